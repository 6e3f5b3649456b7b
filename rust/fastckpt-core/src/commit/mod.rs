//! Durability and visibility. This module alone knows them; nothing else renames, locks, removes or syncs a directory of checkpoints.
//!
//! A checkpoint is built in a directory with a name of its own beside the target (`docs/format.md`, 6), made durable from the
//! inside out, and then takes the target's name in one step: shards (synced by the save), index, manifest, the directory,
//! rename, the parent. Until the rename, nothing under the target's name has changed.

mod clean;
mod directory;
mod leftovers;
mod locks;
mod names;
mod owner;
mod recovery;
mod takeover;
mod target;

use std::ffi::{OsStr, OsString};
use std::io::Write as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, Mode, OFlags};
use rustix::io::{Errno, retry_on_intr};

pub use self::clean::{LeftOver, left_overs, remove_left_over};
pub(crate) use self::directory::refresh;
use self::directory::{Id, id, id_of, open_child, sync};
pub use self::leftovers::State;
use self::leftovers::{remove, sweep};
pub use self::locks::Reach;
pub(crate) use self::locks::reach;
use self::names::workspace_name;
pub use self::recovery::open_checkpoint;
use self::takeover::Step;
use self::target::{Old, look, look_at_name};
use crate::error::{Error, OPEN_PARENT, Result};
use crate::format::{groups, index, manifest};
use crate::sys::file::{open_directory, start_write_back};
use crate::sys::fork::Note;
use crate::sys::lock;

/// How often a commit looks again when others save to and remove the same name meanwhile.
const TURNS: u8 = 100;
/// What the owner of a directory needs to fill it.
const OWNER: u32 = 0o700;

/// Splits the target into its parent and its own name.
fn split(path: &Path) -> Result<(PathBuf, OsString)> {
    let name = path.file_name().ok_or_else(|| Error::Exists {
        path: path.to_path_buf(),
        why: "the path must end in the checkpoint's own name".to_owned(),
    })?;
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Ok((parent.to_path_buf(), name.to_owned()))
}

/// Whether `name` inside a checkpoint is one that fastckpt writes.
fn is_ours(name: &[u8]) -> bool {
    let Ok(name) = std::str::from_utf8(name) else { return false };
    groups::is_shard_name(name) || [manifest::FILE, index::FILE].contains(&name)
}

/// Looks whether a save to `target` would be refused as things stand: its parent is missing, or something has the name that stays.
pub fn check(target: &Path, overwrite: bool) -> Result<()> {
    let (parent_path, name) = split(target)?;
    let parent = open_directory(&parent_path).map_err(Error::io(OPEN_PARENT, &parent_path))?;
    look_at_name(parent.as_fd(), &name, target, overwrite).map(drop)
}

/// A checkpoint being built beside its target. Dropped without a commit, it is removed.
#[derive(Debug)]
pub struct Workspace {
    parent: OwnedFd,
    parent_path: PathBuf,
    target: PathBuf,
    name: OsString,
    temporary: OsString,
    _note: Note,
    directory: OwnedFd,
    id: Id,
    /// The manifest, empty until its content is written: its lock proves that the writer lives. A forked child does not keep it.
    manifest: Option<(Note, std::fs::File)>,
    overwrite: bool,
    /// What had the target's name when the save began.
    before: Option<Id>,
    /// The mode of that.
    mode: Option<u32>,
    /// Who removes it if it comes to nothing: not a forked child.
    process: u32,
    committed: bool,
}

/// What a commit has to tell.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// Another save to the same path ended while this one ran, and this one replaced its checkpoint.
    pub rival: bool,
    /// The file system cannot be asked to make names durable.
    pub unsynced: bool,
    /// The old checkpoint had to make way before the new one took its place.
    pub in_two_steps: bool,
}

impl Committed {
    /// In words.
    #[must_use]
    pub fn warnings(self) -> Vec<String> {
        let rival = "another save to this path ended while this one ran, and its checkpoint was replaced: processes of one job need a path \
            each, or one of them saves";
        let unsynced = "this file system does not sync directories: whether the checkpoint's name survives a power cut is up to it";
        let all = [(self.rival, rival), (self.unsynced, unsynced)];
        all.into_iter().filter(|(applies, _)| *applies).map(|(_, text)| text.to_owned()).collect()
    }
}

impl Workspace {
    /// Looks at the target, sweeps what dead writers left beside it, and makes the temporary directory.
    pub fn create(target: &Path, overwrite: bool) -> Result<Self> {
        let (parent_path, name) = split(target)?;
        let parent = open_directory(&parent_path).map_err(Error::io(OPEN_PARENT, &parent_path))?;
        let old = look(parent.as_fd(), &name, target, overwrite)?;
        sweep(parent.as_fd());
        let failed = |error: Errno| Error::io("create a temporary directory in", &parent_path)(error);
        let mut turn = 0;
        loop {
            turn += 1;
            let temporary = workspace_name(&name);
            match fs::mkdirat(&parent, &temporary, Mode::from_raw_mode(0o777)) {
                Err(Errno::EXIST) if turn < TURNS => continue,
                other => other.map_err(failed)?,
            }
            match furnish(parent.as_fd(), &temporary, old.as_ref()) {
                Ok((directory, id, manifest)) => {
                    return Ok(Self {
                        parent,
                        parent_path,
                        target: target.to_path_buf(),
                        name,
                        temporary,
                        _note: Note::new(directory.as_fd()),
                        directory,
                        id,
                        manifest: Some((Note::new(manifest.as_fd()), manifest)),
                        overwrite,
                        before: old.as_ref().map(|old| old.id),
                        mode: old.map(|old| old.mode),
                        process: std::process::id(),
                        committed: false,
                    });
                }
                // A sweep may meet the directory before its manifest is there and locked: then it is gone by now.
                Err(Errno::NOENT | Errno::STALE) if turn < TURNS => discard(parent.as_fd(), &temporary),
                Err(error) => {
                    discard(parent.as_fd(), &temporary);
                    return Err(Error::io("open the temporary directory in", &parent_path)(error));
                }
            }
        }
    }

    /// The directory to create shards in.
    #[must_use]
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// Where a file of the checkpoint is at this moment, for messages.
    #[must_use]
    pub fn path_of(&self, file: &str) -> PathBuf {
        self.parent_path.join(&self.temporary).join(file)
    }

    /// Writes the index, and begins to write it back.
    pub fn write_index(&self, bytes: &[u8]) -> Result<Index> {
        let path = self.path_of(index::FILE);
        let file = create(self.directory(), index::FILE).map_err(Error::io("create", &path))?;
        fill(&file, &path, bytes)?;
        Ok(Index { file, path })
    }

    /// Writes the manifest's content, after all else, and begins to write it back.
    pub fn write_manifest(&self, bytes: &[u8]) -> Result<()> {
        self.manifest.as_ref().map_or(Ok(()), |(_, file)| fill(file, &self.path_of(manifest::FILE), bytes))
    }

    /// Makes the manifest durable.
    pub fn sync_manifest(&self) -> Result<()> {
        let synced = self.manifest.as_ref().map_or(Ok(()), |(_, file)| retry_on_intr(|| fs::fsync(file)));
        synced.map_err(Error::io("sync", &self.path_of(manifest::FILE)))
    }

    /// Gives the directory the mode of the one that it replaces, where that is closed to its owner, too: until now it had to be filled.
    fn close_to_others(&self) -> Result<()> {
        if let Some(mode) = self.mode.filter(|mode| mode & OWNER != OWNER) {
            // Refused where the file system has no modes.
            let _ = fs::fchmod(&self.directory, Mode::from_raw_mode(mode));
            sync(self.directory()).map_err(Error::io("sync the directory", &self.target))?;
        }
        Ok(())
    }

    /// Gives the finished checkpoint the target's name. All its files are durable by now: `shards`, by name and size, index and
    /// manifest.
    pub fn commit<'a>(mut self, shards: impl Iterator<Item = (&'a str, u64)>) -> Result<Committed> {
        for (file, bytes) in shards {
            // Somebody may have cleaned up where nothing was to be cleaned.
            let path = self.path_of(file);
            let stat = fs::statat(&self.directory, file, AtFlags::SYMLINK_NOFOLLOW)
                .map_err(Error::io("find the finished shard", &path))?;
            if u64::try_from(stat.st_size) != Ok(bytes) {
                return Err(Error::corrupt(
                    &path,
                    "somebody changed the shard before the checkpoint was complete",
                ));
            }
        }
        let mut done = Committed::default();
        let mut attempt = 0;
        let displaced = loop {
            let old = look(self.parent.as_fd(), &self.name, &self.target, self.overwrite)?;
            done.rival |= old.as_ref().is_some_and(|old| Some(old.id) != self.before);
            match self.take_the_name(old.as_ref(), attempt, &mut done)? {
                Step::Done(displaced) => break displaced,
                Step::Again => attempt += 1,
            }
        };
        self.committed = true;
        self.close_to_others()?;
        done.unsynced |=
            !sync(self.parent.as_fd()).map_err(Error::io("sync the directory", &self.parent_path))?;
        // XFS that has shut down syncs a directory without an error; asked for a file it admits the failure.
        match fs::statat(&self.parent, &self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(_) | Err(Errno::NOENT | Errno::STALE) => {}
            Err(error) => return Err(Error::io("find after its rename", &self.target)(error)),
        }
        // No longer needed; if removing it fails the next save will sweep it.
        if let Some((displaced, id)) = displaced {
            let _ = remove(self.parent.as_fd(), &displaced, id, None);
        }
        if done.in_two_steps {
            // A rival that was killed may have taken one aside that this save did not meet. It must not come back.
            sweep(self.parent.as_fd());
        }
        Ok(done)
    }
}

/// Opens a new workspace, closes it to those whom `old` is closed to, and makes its manifest, empty and locked.
fn furnish(
    parent: BorrowedFd<'_>,
    temporary: &OsStr,
    old: Option<&Old>,
) -> rustix::io::Result<(OwnedFd, Id, std::fs::File)> {
    let directory = open_child(parent, temporary)?;
    if let Some(old) = old {
        // Refused where the file system has no modes.
        let _ = fs::fchmod(&directory, Mode::from_raw_mode(old.mode | OWNER));
    }
    let manifest = create(directory.as_fd(), manifest::FILE)?;
    match lock::take(&manifest) {
        // A sweep has it.
        Err(error) if lock::is_taken(&error) => return Err(Errno::NOENT),
        // Refused where the file system has no locks; nobody relies on them there.
        _ => {}
    }
    let id = id(&fs::fstat(&directory)?);
    // A network client takes its own word for a name that it made a moment ago.
    refresh(parent);
    if id_of(parent, temporary) == Some(id) { Ok((directory, id, manifest)) } else { Err(Errno::NOENT) }
}

/// Removes a workspace that holds a manifest at most.
fn discard(parent: BorrowedFd<'_>, temporary: &OsStr) {
    if let Ok(directory) = open_child(parent, temporary) {
        let _ = fs::unlinkat(&directory, manifest::FILE, AtFlags::empty());
        let _ = fs::unlinkat(parent, temporary, AtFlags::REMOVEDIR);
    }
}

fn create(directory: BorrowedFd<'_>, name: &str) -> rustix::io::Result<std::fs::File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = retry_on_intr(|| fs::openat(directory, name, flags, Mode::from_raw_mode(0o666)))?;
    Ok(std::fs::File::from(fd))
}

fn fill(mut file: &std::fs::File, path: &Path, bytes: &[u8]) -> Result<()> {
    file.write_all(bytes).map_err(Error::io("write", path))?;
    start_write_back(file.as_fd(), 0, bytes.len() as u64);
    Ok(())
}

/// The index of a [`Workspace`], written and on its way to the disk.
#[derive(Debug)]
#[must_use = "it is not durable yet"]
pub struct Index {
    file: std::fs::File,
    path: PathBuf,
}

impl Index {
    /// Makes it durable, and closes it.
    pub fn sync(self) -> Result<()> {
        retry_on_intr(|| fs::fsync(&self.file)).map_err(Error::io("sync", &self.path))
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // Closed first: NFS and FUSE only rename a file that is open, and the directory stays.
        self.manifest = None;
        if !self.committed && self.process == std::process::id() {
            let _ = remove(self.parent.as_fd(), &self.temporary, self.id, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    pub(super) fn checkpoint(parent: &Path, name: &str, text: &str) -> PathBuf {
        let path = parent.join(name);
        let workspace = Workspace::create(&path, true).unwrap();
        workspace.write_manifest(format!("{{\"fastckpt\":1,{text}").as_bytes()).unwrap();
        workspace.sync_manifest().unwrap();
        workspace.commit([].into_iter()).unwrap();
        path
    }

    pub(super) fn content(path: &Path) -> String {
        std::fs::read_to_string(path.join(manifest::FILE)).unwrap()
    }

    pub(super) fn names(path: &Path) -> Vec<String> {
        let mut all: Vec<_> =
            std::fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        all.sort();
        all
    }

    #[test]
    fn a_second_save_replaces_the_first_and_leaves_nothing() {
        let parent = tempfile::tempdir().unwrap();
        checkpoint(parent.path(), "c", "one");
        let path = checkpoint(parent.path(), "c", "two");
        assert!(content(&path).ends_with("two"));
        assert_eq!(names(parent.path()), ["c"]);
    }

    #[test]
    fn an_abandoned_save_leaves_the_old_one() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        let workspace = Workspace::create(&path, true).unwrap();
        let _ = workspace.write_index(b"half").unwrap();
        drop(workspace);
        assert!(content(&path).ends_with("one"));
        assert_eq!(names(parent.path()), ["c"]);
    }

    #[test]
    fn only_checkpoints_are_overwritten_and_only_when_allowed() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        let refused = |overwrite| matches!(Workspace::create(&path, overwrite), Err(Error::Exists { .. }));
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("model.safetensors"), "mine").unwrap();
        assert!(refused(true), "somebody's weights");
        std::fs::remove_dir_all(&path).unwrap();
        std::fs::write(&path, "mine").unwrap();
        assert!(refused(true), "a file");
        std::fs::remove_file(&path).unwrap();
        checkpoint(parent.path(), "real", "one");
        std::os::unix::fs::symlink("real", &path).unwrap();
        assert!(refused(true), "a link");
        std::fs::remove_file(&path).unwrap();
        checkpoint(parent.path(), "c", "one");
        assert!(refused(false), "overwrite=False");
        std::fs::create_dir(path.join("sub")).unwrap();
        assert!(refused(true), "a directory inside");
    }

    #[test]
    fn a_directory_that_loses_nothing_is_filled() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        std::fs::create_dir(&path).unwrap();
        drop(Workspace::create(&path, false).unwrap());
        checkpoint(parent.path(), "c", "one");
        std::fs::remove_file(path.join(manifest::FILE)).unwrap();
        std::fs::write(path.join("config.json"), "{}").unwrap();
        checkpoint(parent.path(), "c", "two");
        assert_eq!(names(&path), ["config.json", "fastckpt.json"]);
        assert_eq!(names(parent.path()), ["c"]);
    }

    #[test]
    fn a_replaced_checkpoint_passes_its_mode_on() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        for mode in [0o700, 0o500] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            checkpoint(parent.path(), "c", "two");
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, mode);
            assert_eq!(names(parent.path()), ["c"]);
        }
    }

    #[test]
    fn what_takes_the_name_during_a_save_is_told_of_or_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        let begin = || {
            let workspace = Workspace::create(&path, true).unwrap();
            workspace.write_manifest(b"{\"fastckpt\":1,late").unwrap();
            workspace
        };
        let late = begin();
        checkpoint(parent.path(), "c", "rival");
        std::fs::write(path.join("config.json"), "{}").unwrap();
        assert!(late.commit([].into_iter()).unwrap().rival);
        assert!(content(&path).ends_with("late"));
        assert_eq!(names(&path), ["config.json", "fastckpt.json"]);
        let late = begin();
        assert!(!late.commit([].into_iter()).unwrap().rival);
        let late = begin();
        std::fs::remove_dir_all(&path).unwrap();
        std::fs::create_dir_all(path.join("my experiments")).unwrap();
        assert!(matches!(late.commit([].into_iter()), Err(Error::Exists { .. })));
        assert_eq!(names(&path), ["my experiments"]);
        assert_eq!(names(parent.path()), ["c"]);
    }

    #[test]
    fn long_names_have_temporary_names_too() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), &"n".repeat(255), "one");
        assert!(content(&path).ends_with("one"));
    }

    #[test]
    fn modes_follow_the_umask() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        let probe = parent.path().join("probe");
        std::fs::write(&probe, "").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path.join(manifest::FILE)), mode(&probe));
    }

    #[test]
    fn a_missing_parent_is_named() {
        let error = Workspace::create(Path::new("/nowhere/at/all/c"), true).unwrap_err();
        assert!(error.to_string().contains("/nowhere/at/all"), "{error}");
        assert!(matches!(error, Error::Io { source, .. } if source.kind() == io::ErrorKind::NotFound));
    }
}
