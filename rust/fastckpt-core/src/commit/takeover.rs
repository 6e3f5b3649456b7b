//! How a finished checkpoint takes its final name, and what happens to the previous one (`docs/format.md`, 6.3).

use std::ffi::{OsStr, OsString};
use std::os::fd::AsFd as _;

use rustix::io::Errno;

use super::content::{has_magic, sync_names};
use super::directory::{Id, OWNER, TURNS, id, id_of, id_of_renamed, open_child, refresh, sync};
use super::leftovers::{is_superseded, remove, sweep};
use super::names::{aside_name, displaced_name};
use super::recovery::is_free;
use super::target::{Old, examine, is_gone, look};
use super::workspace::Workspace;
use crate::error::{Error, Result};
use crate::sys::fs::{self, AtFlags, Mode, RenameFlags};

/// The facts that publishing reports.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Published {
    /// Another save to the same path ended while this one ran, and this one replaced its checkpoint.
    pub rival: bool,
    /// The file system cannot make names durable on request.
    pub unsynced: bool,
    /// The old checkpoint had to be moved aside before the new one took its name.
    pub in_two_steps: bool,
}

impl Published {
    /// The warnings, as text.
    #[must_use]
    pub fn warnings(self) -> Vec<String> {
        let rival = "another save to this path ended while this one ran, and its checkpoint was replaced: processes \
            of one job must save to different paths, or only one of them may save";
        let unsynced = "this file system does not sync directories: the checkpoint's name may not survive a power \
            cut";
        let all = [(self.rival, rival), (self.unsynced, unsynced)];
        all.into_iter().filter(|(applies, _)| *applies).map(|(_, text)| text.to_owned()).collect()
    }
}

/// A directory to remove after another checkpoint has taken its name. It is removed when this is dropped. The next save
/// sweeps anything that is left.
#[derive(Debug)]
#[must_use = "dropping it may take a long time"]
pub struct Displaced {
    /// The published checkpoint, which is not removed.
    workspace: Workspace,
    found: Option<(OsString, Id)>,
    /// Whether a killed rival may have moved a checkpoint aside unseen by this save. It must not come back.
    in_two_steps: bool,
}

impl Drop for Displaced {
    fn drop(&mut self) {
        let parent = self.workspace.parent.as_fd();
        if let Some((name, id)) = &self.found {
            let _ = remove(parent, name, *id, None);
        }
        if self.in_two_steps {
            sweep(parent);
        }
    }
}

/// The outcome of a rename.
pub(super) enum Step {
    /// This workspace has the name. The directory under the other name, if there is one, is no longer needed.
    Done(Option<(OsString, Id)>),
    /// Another process was faster: try again.
    Again,
}

impl Workspace {
    /// Gives the sealed checkpoint its final name, makes that name durable, and removes the previous one.
    pub fn publish(self) -> Result<Published> {
        self.publish_beside_old().map(|(done, _)| done)
    }

    /// Like [`Self::publish`], but the previous checkpoint is removed when the second value is dropped.
    pub fn publish_beside_old(mut self) -> Result<(Published, Displaced)> {
        let own = self.own.as_ref().ok_or_else(|| self.refused("publish", "another process made it"))?;
        let files = own.sealed.as_ref().ok_or_else(|| self.refused("publish", "it is not sealed"))?;
        self.check_files(files)?;
        let (before, mode) = (own.before, own.mode);
        let mut done = Published::default();
        let mut attempt = 0;
        let displaced = loop {
            let old = look(self.parent.as_fd(), &self.name, &self.target, self.overwrite)?;
            done.rival |= old.as_ref().is_some_and(|old| Some(old.id) != before);
            match self.take_the_name(old.as_ref(), attempt, &mut done)? {
                Step::Done(displaced) => break displaced,
                Step::Again => attempt += 1,
            }
        };
        self.own = None;
        self.close_to_others(mode)?;
        done.unsynced |=
            !sync(self.parent.as_fd()).map_err(Error::io("sync the directory", &self.parent_path))?;
        // An XFS file system that has shut down syncs a directory without an error, and reports the failure only when a
        // file is looked up.
        match fs::statat(&self.parent, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) | Err(Errno::NOENT | Errno::STALE) => {}
            Err(error) => return Err(Error::io("find the renamed checkpoint", &self.target)(error)),
        }
        let in_two_steps = done.in_two_steps;
        Ok((done, Displaced { workspace: self, found: displaced, in_two_steps }))
    }

    /// Gives the directory the mode of the directory that it replaced, if that mode denies access even to the owner.
    /// Earlier, the owner had to write to the directory.
    fn close_to_others(&self, mode: Option<u32>) -> Result<()> {
        if let Some(mode) = mode.filter(|mode| mode & OWNER != OWNER) {
            // This fails if the file system has no modes.
            let _ = fs::fchmod(self.directory(), Mode::from_raw_mode(mode));
            sync(self.directory()).map_err(Error::io("sync the directory", &self.target))?;
        }
        Ok(())
    }

    /// Makes one attempt to take the final name from `old`, or a free name.
    pub(super) fn take_the_name(&self, old: Option<&Old>, attempt: u8, done: &mut Published) -> Result<Step> {
        if let Some(old) = old {
            match self.carry_over(old.directory.as_fd()) {
                Err(error) if is_gone(&error) && attempt < TURNS => return Ok(Step::Again),
                other => drop(other?),
            }
        }
        let path = self.path_of("");
        done.unsynced |= !sync_names(self.directory()).map_err(Error::io("sync the directory", &path))?;
        if old.is_some_and(|old| id_of(self.parent.as_fd(), &old.name) != Some(old.id)) && attempt < TURNS {
            refresh(&self.parent);
            return Ok(Step::Again); // its files may have been listed after it was emptied
        }
        let outcome = match old {
            None => self.take_free_name(),
            Some(old) if old.name != self.name => self.replace_in_two_steps(old, attempt, done),
            Some(old) => self.replace(old, attempt, done),
        };
        match outcome {
            // Another process has already saved to this name, or removed the checkpoint: try again. This does not loop
            // forever, and it does not happen if the finished directory itself was removed.
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

    /// Takes a free name, as the first save to this name does.
    fn take_free_name(&self) -> Result<Step> {
        self.rename().map_err(self.renaming())?;
        Ok(Step::Done(None))
    }

    /// Gives the workspace its final name. Replaces nothing but an empty directory.
    fn rename(&self) -> rustix::io::Result<()> {
        match fs::renameat(&self.parent, &self.temporary, &self.parent, &self.name) {
            // A network file system may send the request twice. The second request then finds that the rename is done.
            Err(Errno::NOENT) if id_of(self.parent.as_fd(), &self.name) == Some(self.id) => Ok(()),
            other => other,
        }
    }

    /// Saves over `old`.
    pub(super) fn replace(&self, old: &Old, attempt: u8, done: &mut Published) -> Result<Step> {
        match self.exchange() {
            Err(Errno::INVAL | Errno::NOSYS) => return self.replace_in_two_steps(old, attempt, done),
            other => other.map_err(self.renaming())?,
        }
        let Some(there) = id_of_renamed(self.parent.as_fd(), &self.temporary) else {
            return Ok(Step::Done(None));
        };
        let there = self.adopt(&self.temporary, there).map_err(|error| self.give_back(error))?;
        done.rival |= there != old.id;
        Ok(Step::Done(Some((self.temporary.clone(), there))))
    }

    /// Gives the displaced directory its name back, because it must not be replaced. `refusal` is the reason.
    fn give_back(&self, refusal: Error) -> Error {
        if self.exchange().is_ok() {
            if self.is_there() {
                return refusal;
            }
            // A third save has taken the name in between and has reported success. Its checkpoint gets the name back.
            let _ = self.exchange();
        }
        // The displaced directory is not a checkpoint of fastckpt. It stays under a name that no sweep removes.
        let kept = displaced_name(&self.temporary);
        let _ = fs::renameat(&self.parent, &self.temporary, &self.parent, &kept);
        let why = format!(
            "the directory that appeared there during the save is now `{}`",
            self.parent_path.join(&kept).display()
        );
        Error::Exists { path: self.target.clone(), why }
    }

    fn exchange(&self) -> rustix::io::Result<()> {
        fs::renameat_with(&self.parent, &self.temporary, &self.parent, &self.name, RenameFlags::EXCHANGE)
    }

    /// For file systems that cannot exchange names (NFS, Lustre, FUSE): moves the old checkpoint aside, and gives its
    /// name to the new one. If the name is missing, a load puts the old one back (`recover`), and a save takes it over
    /// (`look`). Neither does so once the new one has had the name: it has no temporary name then.
    pub(super) fn replace_in_two_steps(&self, old: &Old, attempt: u8, done: &mut Published) -> Result<Step> {
        let (parent, name) = (&self.parent, &self.name);
        let aside = aside_name(&self.temporary, attempt);
        done.in_two_steps = true;
        // After a power cut, the old checkpoint is valid only beside the workspace, whose name may not be durable yet.
        sync(parent.as_fd()).map_err(Error::io("sync the directory", &self.parent_path))?;
        fs::renameat(parent, &old.name, parent, &aside).map_err(self.renaming())?;
        let put_back = |error: Error| {
            let _ = fs::renameat(parent, &aside, parent, name);
            error
        };
        let there = id_of_renamed(parent.as_fd(), &aside).unwrap_or(old.id);
        let there = self.adopt(&aside, there).map_err(put_back)?;
        done.rival |= there != old.id;
        let mut outcome = self.rename();
        if matches!(outcome, Err(Errno::EXIST | Errno::NOTEMPTY)) && is_free(parent.as_fd(), name) {
            outcome = self.rename(); // the name is free again
        }
        match outcome {
            Ok(()) => Ok(Step::Done(Some((aside, there)))),
            Err(error @ (Errno::EXIST | Errno::NOTEMPTY)) => {
                // Another save took the name, or another process put the old checkpoint back. In the second case it is
                // no longer moved aside. If the checkpoint that took the name was written before the old one, the old
                // one stays, and is swept once this save has the name.
                let holder = open_child(parent.as_fd(), name);
                let checkpoint = holder.is_ok_and(|holder| has_magic(holder.as_fd()).unwrap_or(false));
                if is_superseded(parent.as_fd(), name, &aside) && sync(parent.as_fd()).is_ok() {
                    let _ = remove(parent.as_fd(), &aside, there, None);
                } else if !checkpoint && id_of(parent.as_fd(), &aside) == Some(there) {
                    let old = self.parent_path.join(&aside);
                    let why =
                        format!("something took the name; the old checkpoint is now `{}`", old.display());
                    return Err(Error::Exists { path: self.target.clone(), why });
                }
                Err(self.renaming()(error))
            }
            Err(error) => Err(put_back(self.renaming()(error))),
        }
    }

    /// Checks the displaced directory, and returns its id. It may be another directory than the examined one, or hold
    /// more by now. It must be replaceable. Files in it that fastckpt did not write are carried over.
    ///
    /// `seen` is the id that the name had after the rename. If a rival renamed at the same moment, FUSE and NFS may
    /// have returned the id of the other directory, so the id is read again until the name opens with it.
    fn adopt(&self, displaced: &OsStr, mut seen: Id) -> Result<Id> {
        let mut turn = 0;
        let directory = loop {
            let directory = match open_child(self.parent.as_fd(), displaced) {
                Err(Errno::NOENT | Errno::STALE) => return Ok(seen),
                Err(Errno::NOTDIR | Errno::LOOP) => {
                    return Err(Error::Exists {
                        path: self.target.clone(),
                        why: "something was put there during the save: choose another name".to_owned(),
                    });
                }
                other => other.map_err(Error::io("open", &self.target))?,
            };
            if fs::fstat(&directory).map(|stat| id(&stat)) == Ok(seen) {
                break directory;
            }
            if turn == TURNS {
                let why = "another machine put something there during the save, and it cannot be read yet: \
                           save again";
                return Err(Error::Exists { path: self.target.clone(), why: why.to_owned() });
            }
            turn += 1;
            match id_of_renamed(self.parent.as_fd(), displaced) {
                Some(there) => seen = there,
                None => return Ok(seen),
            }
        };
        if let Err(refusal) = examine(directory.as_fd(), &self.target, self.overwrite) {
            // Another save may have taken the directory over and be removing it. Its contents then prove nothing.
            return if id_of_renamed(self.parent.as_fd(), displaced) == Some(seen) {
                Err(refusal)
            } else {
                Ok(seen)
            };
        }
        if self.carry_over(directory.as_fd())? {
            sync(self.directory()).map_err(Error::io("sync the directory", &self.target))?;
        }
        Ok(seen)
    }
}

/// Whether the name was taken or became free during an attempt.
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
    use crate::commit::tests::{checkpoint, content, names, sealed};

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
            let outcome = replace(&workspace, &old, 0, &mut Published::default());
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
            let workspace = sealed(&path, "mine");
            let old = look(workspace.parent.as_fd(), OsStr::new("c"), &path, true).unwrap().unwrap();
            checkpoint(parent.path(), "c", "rival");
            std::fs::write(path.join("config.json"), "{}").unwrap();
            let mut done = Published::default();
            assert!(matches!(replace(&workspace, &old, 0, &mut done).unwrap(), Step::Done(Some(_))));
            assert!(done.rival && content(&path).ends_with("mine"));
            assert_eq!(names(&path), ["config.json", "fastckpt.json"]);
        }
    }

    #[test]
    fn what_was_displaced_is_found_although_its_id_was_read_too_early() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        let workspace = sealed(&path, "mine");
        let (old, name) = (id_of(workspace.parent.as_fd(), OsStr::new("c")).unwrap(), OsStr::new("c"));
        checkpoint(parent.path(), "c", "rival");
        std::fs::write(path.join("config.json"), "{}").unwrap();
        let there = id_of(workspace.parent.as_fd(), name).unwrap();
        assert_ne!(old, there);
        assert_eq!(workspace.adopt(name, old).unwrap(), there);
        assert!(parent.path().join(&workspace.temporary).join("config.json").exists());
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
                // Saves as an editor does: a new file takes the name.
                std::fs::write(parent.path().join("new"), text).unwrap();
                std::fs::rename(parent.path().join("new"), path.join("config.json")).unwrap();
            };
            config("old");
            let workspace = sealed(&path, "two");
            let old = look(workspace.parent.as_fd(), OsStr::new("c"), &path, true).unwrap().unwrap();
            assert!(workspace.carry_over(old.directory.as_fd()).unwrap());
            assert!(!workspace.carry_over(old.directory.as_fd()).unwrap(), "the file is here already");
            config("new");
            std::fs::write(path.join("notes.txt"), "late").unwrap();
            replace(&workspace, &old, 0, &mut Published::default()).unwrap();
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
            let outcome = replace(&workspace, &old, 0, &mut Published::default());
            assert!(matches!(outcome, Err(Error::Exists { .. })));
            assert!(content(&path).ends_with("one") && path.join("logs").is_dir());
        }
    }

    #[test]
    fn a_save_that_began_earlier_and_took_the_name_is_no_failure() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        let workspace = sealed(&path, "mine");
        let rival = checkpoint(parent.path(), "rival", "rival");
        let written = std::fs::File::open(rival.join("fastckpt.json")).unwrap();
        written.set_modified(std::time::UNIX_EPOCH).unwrap();
        // The rival takes the name between the two renames of the first attempt.
        let aside = aside_name(&workspace.temporary, 0);
        std::fs::rename(&path, parent.path().join(&aside)).unwrap();
        std::fs::rename(&rival, &path).unwrap();
        let old = look(workspace.parent.as_fd(), &aside, &path, true).unwrap().unwrap();
        let outcome = workspace.replace_in_two_steps(&old, 1, &mut Published::default());
        assert!(is_taken(&outcome.err().unwrap()));
        workspace.publish().unwrap();
        assert!(content(&path).ends_with("mine"));
    }
}
