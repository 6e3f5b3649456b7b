//! How a finished checkpoint takes the target's name, and what happens to the one that had it (`docs/format.md`, 6.3).

use std::ffi::{CStr, OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use super::directory::{Id, entries, id, id_of, id_of_renamed, open_child, refresh, sync};
use super::leftovers::{is_superseded, remove};
use super::names::aside_name;
use super::recovery::is_free;
use super::target::{Old, examine, has_magic};
use super::{Committed, TURNS, Workspace, is_ours};
use crate::error::{Error, Result};

/// What a rename came to.
pub(super) enum Step {
    /// The name is ours. What lies under another one, if anything, is no longer needed.
    Done(Option<(OsString, Id)>),
    /// Somebody else was faster: look again.
    Again,
}

impl Workspace {
    /// One attempt to take the target's name, which `old` has.
    pub(super) fn take_the_name(&self, old: Option<&Old>, attempt: u8, done: &mut Committed) -> Result<Step> {
        if let Some(old) = old {
            match self.carry_over(old.directory.as_fd()) {
                Err(error) if is_gone(&error) && attempt < TURNS => return Ok(Step::Again),
                other => drop(other?),
            }
        }
        let path = self.path_of("");
        done.unsynced |= !sync(self.directory()).map_err(Error::io("sync the directory", &path))?;
        if old.is_some_and(|old| id_of(self.parent.as_fd(), &old.name) != Some(old.id)) && attempt < TURNS {
            refresh(&self.parent);
            return Ok(Step::Again); // its files may have been listed after it was emptied
        }
        let outcome = match old {
            None => self.publish(),
            Some(old) if old.name != self.name => self.replace_in_two_steps(old, attempt, done),
            Some(old) => self.replace(old, attempt, done),
        };
        match outcome {
            // Somebody else's save came first, or its removal did: look again. But not for ever, and not when it is the finished
            // directory itself that somebody removed.
            Err(ref error) if is_taken(error) && attempt < TURNS && self.is_there() => {
                refresh(&self.parent);
                Ok(Step::Again)
            }
            other => other,
        }
    }

    /// Whether the workspace still has its temporary name.
    pub(super) fn is_there(&self) -> bool {
        id_of(self.parent.as_fd(), &self.temporary) == Some(self.id)
    }

    fn renaming(&self) -> impl FnOnce(Errno) -> Error {
        Error::io("rename the finished checkpoint to", &self.target)
    }

    /// First save to this name.
    fn publish(&self) -> Result<Step> {
        self.rename().map_err(self.renaming())?;
        Ok(Step::Done(None))
    }

    /// Gives the workspace the target's name. Replaces nothing but an empty directory.
    fn rename(&self) -> rustix::io::Result<()> {
        match fs::renameat(&self.parent, &self.temporary, &self.parent, &self.name) {
            // Sent twice over a network, it may find that it was done.
            Err(Errno::NOENT) if id_of(self.parent.as_fd(), &self.name) == Some(self.id) => Ok(()),
            other => other,
        }
    }

    /// Save over `old`.
    pub(super) fn replace(&self, old: &Old, attempt: u8, done: &mut Committed) -> Result<Step> {
        match self.exchange() {
            Err(Errno::INVAL | Errno::NOSYS) => return self.replace_in_two_steps(old, attempt, done),
            other => other.map_err(self.renaming())?,
        }
        let Some(there) = id_of_renamed(self.parent.as_fd(), &self.temporary) else {
            return Ok(Step::Done(None));
        };
        done.rival |= there != old.id;
        self.adopt(&self.temporary, there).map_err(|error| self.give_back(error))?;
        Ok(Step::Done(Some((self.temporary.clone(), there))))
    }

    /// Puts back under the target's name what was displaced and must not be replaced, for the reason `refusal`.
    fn give_back(&self, refusal: Error) -> Error {
        if self.exchange().is_ok() {
            if self.is_there() {
                return refusal;
            }
            // A third save took the name in between. It was told that it has it.
            let _ = self.exchange();
        }
        // What is displaced is somebody's own: under a name that nobody sweeps it stays.
        let mut kept = self.temporary.clone();
        kept.push(".displaced");
        let _ = fs::renameat(&self.parent, &self.temporary, &self.parent, &kept);
        let why = format!(
            "what was put there while it was saved now is `{}`",
            self.parent_path.join(&kept).display()
        );
        Error::Exists { path: self.target.clone(), why }
    }

    fn exchange(&self) -> rustix::io::Result<()> {
        fs::renameat_with(&self.parent, &self.temporary, &self.parent, &self.name, RenameFlags::EXCHANGE)
    }

    /// Where names cannot be exchanged (NFS, Lustre, FUSE): the old one makes way, the new one takes its place. A load or save that
    /// finds the name missing puts the old one back (`recover`), unless the new one has it: then it no longer has a temporary name.
    pub(super) fn replace_in_two_steps(&self, old: &Old, attempt: u8, done: &mut Committed) -> Result<Step> {
        let (parent, name) = (&self.parent, &self.name);
        let aside = aside_name(&self.temporary, attempt);
        done.in_two_steps = true;
        fs::renameat(parent, &old.name, parent, &aside).map_err(self.renaming())?;
        let put_back = |error: Error| {
            let _ = fs::renameat(parent, &aside, parent, name);
            error
        };
        let there = id_of_renamed(parent.as_fd(), &aside).unwrap_or(old.id);
        done.rival |= there != old.id;
        self.adopt(&aside, there).map_err(put_back)?;
        let mut outcome = self.rename();
        if matches!(outcome, Err(Errno::EXIST | Errno::NOTEMPTY)) && is_free(parent.as_fd(), name) {
            outcome = self.rename(); // whoever was there made way again
        }
        match outcome {
            Ok(()) => Ok(Step::Done(Some((aside, there)))),
            Err(error @ (Errno::EXIST | Errno::NOTEMPTY)) => {
                // Somebody's save took the name, or somebody put the old one back: then it is not aside any more. A save that began
                // earlier and took it leaves the old one to be swept when this one has the name.
                let holder = open_child(parent.as_fd(), name);
                let checkpoint = holder.is_ok_and(|holder| has_magic(holder.as_fd()).unwrap_or(false));
                if is_superseded(parent.as_fd(), name, &aside) && sync(parent.as_fd()).is_ok() {
                    let _ = remove(parent.as_fd(), &aside, there, None);
                } else if !checkpoint && id_of(parent.as_fd(), &aside) == Some(there) {
                    let old = self.parent_path.join(&aside);
                    let why = format!("something else took the name; what was there is `{}`", old.display());
                    return Err(Error::Exists { path: self.target.clone(), why });
                }
                Err(self.renaming()(error))
            }
            Err(error) => Err(put_back(self.renaming()(error))),
        }
    }

    /// Looks at what was displaced, which may be another directory than the one that was looked at before, or hold more by now: it must
    /// be one that may be replaced, and its files of other people are taken along.
    fn adopt(&self, displaced: &OsStr, expected: Id) -> Result<()> {
        let directory = match open_child(self.parent.as_fd(), displaced) {
            Err(Errno::NOENT | Errno::STALE) => return Ok(()),
            Err(Errno::NOTDIR | Errno::LOOP) => {
                return Err(Error::Exists {
                    path: self.target.clone(),
                    why: "somebody put something there while it was saved: choose another name".to_owned(),
                });
            }
            other => other.map_err(Error::io("open", &self.target))?,
        };
        if fs::fstat(&directory).map(|stat| id(&stat)) != Ok(expected) {
            let why = "another machine put something there while it was saved, which cannot be looked at yet: save again";
            return Err(Error::Exists { path: self.target.clone(), why: why.to_owned() });
        }
        examine(directory.as_fd(), &self.target, self.overwrite)?;
        if self.carry_over(directory.as_fd())? {
            sync(self.directory()).map_err(Error::io("sync the directory", &self.target))?;
        }
        Ok(())
    }

    /// Takes files of other people along from the old checkpoint: a `config.json` laid beside the shards stays there. Returns whether
    /// there was any that was not here yet, or has changed since.
    pub(super) fn carry_over(&self, old: BorrowedFd<'_>) -> Result<bool> {
        let path = &self.target;
        let mut brought = false;
        for (file, kind) in entries(old).map_err(Error::io("list", path))? {
            let ours = is_ours(file.to_bytes()) || is_remnant(file.to_bytes());
            if ours || kind != FileType::RegularFile {
                continue;
            }
            match self.bring(old, &file) {
                Ok(new) => brought |= new,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {} // removed meanwhile
                Err(error) => return Err(Error::io("carry files over from", path)(error)),
            }
        }
        Ok(brought)
    }

    /// Takes one file along, in place of one of that name which is older.
    fn bring(&self, old: BorrowedFd<'_>, file: &CStr) -> io::Result<bool> {
        let there = fs::statat(old, file, AtFlags::SYMLINK_NOFOLLOW)?;
        let same = |here: fs::Stat| {
            let facts = |stat: &fs::Stat| (stat.st_size, stat.st_mtime, stat.st_mtime_nsec);
            id(&here) == id(&there) || facts(&here) == facts(&there)
        };
        if fs::statat(&self.directory, file, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(same) {
            return Ok(false);
        }
        // Whole under another name first: what is cut short here must not be taken for the file in the next attempt.
        let _ = fs::unlinkat(&self.directory, ON_ITS_WAY, AtFlags::empty());
        match fs::linkat(old, file, &self.directory, ON_ITS_WAY, AtFlags::empty()) {
            Ok(()) => {}
            Err(error @ (Errno::NOENT | Errno::STALE)) => return Err(error.into()),
            // No hard links here.
            Err(_) => self.copy_file(old, file)?,
        }
        fs::renameat(&self.directory, ON_ITS_WAY, &self.directory, file)?;
        Ok(true)
    }

    fn copy_file(&self, old: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
        let from = fs::openat(old, name, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let mut from = std::fs::File::from(from);
        let about = from.metadata()?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(about.mode() & 0o777);
        let to = fs::openat(&self.directory, ON_ITS_WAY, flags, mode)?;
        let mut to = std::fs::File::from(to);
        io::copy(&mut from, &mut to)?;
        to.set_modified(about.modified()?)?;
        to.sync_all()
    }
}

/// A file of other people that is being taken along.
const ON_ITS_WAY: &CStr = c".fastckpt-carried";

/// Whether `name` is what an interrupted carrying left, or what a file system makes of a file that is removed while somebody has it open
/// (NFS, FUSE).
fn is_remnant(name: &[u8]) -> bool {
    name == ON_ITS_WAY.to_bytes() || name.starts_with(b".nfs0") || name.starts_with(b".fuse_hidden")
}

/// Whether the directory that was looked at has gone: its successor has the name.
fn is_gone(error: &Error) -> bool {
    matches!(error.errno(), Some(libc::ENOENT | libc::ESTALE))
}

/// Whether the name was taken, or came free, in the middle of an attempt.
fn is_taken(error: &Error) -> bool {
    let others = matches!(error, Error::Io { .. });
    others
        && matches!(
            error.errno(),
            Some(libc::EEXIST | libc::ENOTEMPTY | libc::ENOENT | libc::ESTALE | libc::ENOTDIR)
        )
}

#[cfg(test)]
mod tests {
    use crate::commit::target::look;
    use crate::commit::tests::{checkpoint, content, names};

    use super::*;

    #[test]
    fn what_was_displaced_unseen_is_given_back() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        let workspace = Workspace::create(&path, true).unwrap();
        let old = look(workspace.parent.as_fd(), OsStr::new("c"), &path, true).unwrap().unwrap();
        std::fs::remove_dir_all(&path).unwrap();
        std::fs::create_dir_all(path.join("my experiments")).unwrap();
        for replace in [Workspace::replace, Workspace::replace_in_two_steps] {
            let outcome = replace(&workspace, &old, 0, &mut Committed::default());
            assert!(matches!(outcome, Err(Error::Exists { .. })));
            assert_eq!(names(&path), ["my experiments"]);
            assert!(workspace.is_there());
        }
    }

    #[test]
    fn a_rival_that_was_displaced_unseen_leaves_its_files_of_others() {
        for replace in [Workspace::replace, Workspace::replace_in_two_steps] {
            let parent = tempfile::tempdir().unwrap();
            let path = checkpoint(parent.path(), "c", "one");
            let workspace = Workspace::create(&path, true).unwrap();
            workspace.write_manifest(b"{\"fastckpt\":1,mine").unwrap();
            let old = look(workspace.parent.as_fd(), OsStr::new("c"), &path, true).unwrap().unwrap();
            checkpoint(parent.path(), "c", "rival");
            std::fs::write(path.join("config.json"), "{}").unwrap();
            let mut done = Committed::default();
            assert!(matches!(replace(&workspace, &old, 0, &mut done).unwrap(), Step::Done(Some(_))));
            assert!(done.rival && content(&path).ends_with("mine"));
            assert_eq!(names(&path), ["config.json", "fastckpt.json"]);
        }
    }

    #[test]
    fn files_of_others_are_carried_over() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        std::fs::write(path.join("config.json"), "{}").unwrap();
        std::fs::write(path.join("model-00001-of-00002.safetensors"), "ours, and stale").unwrap();
        checkpoint(parent.path(), "c", "two");
        assert_eq!(names(&path), ["config.json", "fastckpt.json"]);
    }

    #[test]
    fn what_is_laid_into_the_old_one_meanwhile_is_not_lost() {
        for replace in [Workspace::replace, Workspace::replace_in_two_steps] {
            let parent = tempfile::tempdir().unwrap();
            let path = checkpoint(parent.path(), "c", "one");
            let config = |text: &str| {
                // As an editor writes: a new file takes the name.
                std::fs::write(parent.path().join("new"), text).unwrap();
                std::fs::rename(parent.path().join("new"), path.join("config.json")).unwrap();
            };
            config("old");
            let workspace = Workspace::create(&path, true).unwrap();
            workspace.write_manifest(b"{\"fastckpt\":1,two").unwrap();
            let old = look(workspace.parent.as_fd(), OsStr::new("c"), &path, true).unwrap().unwrap();
            assert!(workspace.carry_over(old.directory.as_fd()).unwrap());
            assert!(!workspace.carry_over(old.directory.as_fd()).unwrap(), "it is here already");
            config("new");
            std::fs::write(path.join("notes.txt"), "late").unwrap();
            replace(&workspace, &old, 0, &mut Committed::default()).unwrap();
            assert!(content(&path).ends_with("two"));
            assert_eq!(std::fs::read_to_string(path.join("config.json")).unwrap(), "new");
            assert_eq!(names(&path), ["config.json", "fastckpt.json", "notes.txt"]);
        }
    }

    #[test]
    fn a_directory_that_is_laid_into_the_old_one_meanwhile_keeps_it_in_place() {
        for replace in [Workspace::replace, Workspace::replace_in_two_steps] {
            let parent = tempfile::tempdir().unwrap();
            let path = checkpoint(parent.path(), "c", "one");
            let workspace = Workspace::create(&path, true).unwrap();
            let old = look(workspace.parent.as_fd(), OsStr::new("c"), &path, true).unwrap().unwrap();
            std::fs::create_dir(path.join("logs")).unwrap();
            let outcome = replace(&workspace, &old, 0, &mut Committed::default());
            assert!(matches!(outcome, Err(Error::Exists { .. })));
            assert!(content(&path).ends_with("one") && path.join("logs").is_dir());
        }
    }

    #[test]
    fn a_save_that_began_earlier_and_took_the_name_is_no_failure() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        let workspace = Workspace::create(&path, true).unwrap();
        workspace.write_manifest(b"{\"fastckpt\":1,mine").unwrap();
        let rival = checkpoint(parent.path(), "rival", "rival");
        let written = std::fs::File::open(rival.join("fastckpt.json")).unwrap();
        written.set_modified(std::time::UNIX_EPOCH).unwrap();
        // Between the two renames of the first attempt, the rival's takes place.
        let aside = aside_name(&workspace.temporary, 0);
        std::fs::rename(&path, parent.path().join(&aside)).unwrap();
        std::fs::rename(&rival, &path).unwrap();
        let old = look(workspace.parent.as_fd(), &aside, &path, true).unwrap().unwrap();
        let outcome = workspace.replace_in_two_steps(&old, 1, &mut Committed::default());
        assert!(is_taken(&outcome.err().unwrap()));
        workspace.commit([].into_iter()).unwrap();
        assert!(content(&path).ends_with("mine"));
    }
}
