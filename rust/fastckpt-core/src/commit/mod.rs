//! Durability and visibility. This module alone knows them; nothing else renames, locks, removes or syncs a directory.
//!
//! A checkpoint is built in a directory with a name of its own beside the target (`docs/format.md`, 6), made durable from the
//! inside out, and then takes the target's name in one step: shards (synced by the save), index, manifest, the directory,
//! rename, the parent. Until the rename, nothing under the target's name has changed.

mod leftovers;
mod names;

use std::ffi::OsStr;
use std::io::{self, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, Dir, FileType, FlockOperation, Mode, OFlags, RenameFlags};
use rustix::io::{Errno, retry_on_intr};

pub use self::leftovers::open_checkpoint;
use self::leftovers::{recover, sweep};
use self::names::temporary_name;
use crate::error::{Error, OPEN_PARENT, Result};
use crate::manifest;
use crate::sys::file::{open_directory, open_regular, start_write_back};
use crate::sys::fork::Note;

/// How often a commit looks again when others save to and remove the same name meanwhile.
const TURNS: usize = 100;

/// Splits the target into its parent and its own name.
fn split(path: &Path) -> Result<(PathBuf, std::ffi::OsString)> {
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
    let digits = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let numbered = name
        .strip_prefix("model-")
        .and_then(|rest| rest.strip_suffix(".safetensors"))
        .and_then(|rest| rest.split_once("-of-"))
        .is_some_and(|(index, count)| digits(index) && digits(count));
    numbered || [manifest::FILE, manifest::INDEX_FILE, "model.safetensors"].contains(&name)
}

/// The entries of a directory.
fn entries(directory: BorrowedFd<'_>) -> io::Result<Vec<(std::ffi::CString, FileType)>> {
    let mut all = Vec::new();
    for entry in Dir::read_from(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        if name != c"." && name != c".." {
            let kind = match entry.file_type() {
                FileType::Unknown => {
                    let stat = fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?;
                    FileType::from_raw_mode(stat.st_mode)
                }
                known => known,
            };
            all.push((name.to_owned(), kind));
        }
    }
    Ok(all)
}

/// Opens the directory `name` inside `parent`, not through a symbolic link.
fn open_child(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(retry_on_intr(|| fs::openat(parent, name, flags, Mode::empty()))?)
}

/// Removes the directory `name` of plain files inside `parent`. What is already gone is no failure.
fn remove(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<()> {
    let gone = |outcome: rustix::io::Result<()>| match outcome {
        Err(Errno::NOENT) => Ok(()),
        other => other,
    };
    let directory = match open_child(parent, name) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        other => other?,
    };
    for (file, _) in entries(directory.as_fd())? {
        gone(fs::unlinkat(&directory, &file, AtFlags::empty()))?;
    }
    Ok(gone(fs::unlinkat(parent, name, AtFlags::REMOVEDIR))?)
}

/// A checkpoint being built beside its target. Dropped without a commit, it is removed.
#[derive(Debug)]
pub struct Workspace {
    parent: OwnedFd,
    parent_path: PathBuf,
    target: PathBuf,
    name: std::ffi::OsString,
    temporary: std::ffi::OsString,
    /// A forked child does not keep it: its lock would outlive the writer.
    _note: Note,
    /// Holds the lock that proves that the writer lives.
    directory: OwnedFd,
    overwrite: bool,
    committed: bool,
}

impl Workspace {
    /// Looks at the target, sweeps what dead writers left beside it, and makes the temporary directory.
    pub fn create(target: &Path, overwrite: bool) -> Result<Self> {
        let (parent_path, name) = split(target)?;
        let parent = open_directory(&parent_path).map_err(Error::io(OPEN_PARENT, &parent_path))?;
        recover(&parent_path, parent.as_fd(), &name);
        check_target(parent.as_fd(), &name, target, overwrite)?;
        sweep(parent.as_fd(), &name);
        let failed = |error: Errno| Error::io("create a temporary directory in", &parent_path)(error);
        loop {
            let temporary = temporary_name(&name, "tmp");
            match fs::mkdirat(&parent, &temporary, Mode::from_raw_mode(0o777)) {
                Err(Errno::EXIST) => continue,
                other => other.map_err(failed)?,
            }
            // A sweep may meet the directory before it is locked: then it is gone by now, or about to go.
            let directory = match open_child(parent.as_fd(), &temporary) {
                Ok(directory) => directory,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => {
                    let _ = fs::unlinkat(&parent, &temporary, AtFlags::REMOVEDIR);
                    return Err(Error::io("open the temporary directory in", &parent_path)(error));
                }
            };
            // Any other refusal is that of a file system without locks, where no sweep removes anything.
            let swept =
                fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) == Err(Errno::WOULDBLOCK);
            let named = fs::statat(&parent, &temporary, AtFlags::SYMLINK_NOFOLLOW);
            if swept || matches!(named, Err(Errno::NOENT)) {
                continue;
            }
            let target = target.to_path_buf();
            return Ok(Self {
                parent,
                parent_path,
                target,
                name,
                temporary,
                _note: Note::new(directory.as_fd()),
                directory,
                overwrite,
                committed: false,
            });
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

    /// Writes a small file. It is durable after [`SmallFile::sync`].
    pub fn write_file(&self, file: &str, bytes: &[u8]) -> Result<SmallFile> {
        let path = self.path_of(file);
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
        let fd = retry_on_intr(|| fs::openat(&self.directory, file, flags, Mode::from_raw_mode(0o666)))
            .map_err(Error::io("create", &path))?;
        let mut file = std::fs::File::from(fd);
        file.write_all(bytes).map_err(Error::io("write", &path))?;
        start_write_back(file.as_fd(), 0, bytes.len() as u64);
        Ok(SmallFile { file, path })
    }

    /// Gives the finished checkpoint the target's name. All its files are durable by now: `shards`, by name and size, and what
    /// [`Workspace::write_file`] wrote.
    pub fn commit<'a>(mut self, shards: impl Iterator<Item = (&'a str, u64)>) -> Result<()> {
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
        let sync = |fd: &OwnedFd, path: &Path| {
            retry_on_intr(|| fs::fsync(fd)).map_err(Error::io("sync the directory", path))
        };
        for turn in 0.. {
            let old = open_child(self.parent.as_fd(), &self.name).ok();
            if let Some(old) = &old {
                check_target(self.parent.as_fd(), &self.name, &self.target, self.overwrite)?;
                self.carry_over(old.as_fd())?;
            }
            sync(&self.directory, &self.path_of(""))?;
            match if old.is_some() { self.replace() } else { self.publish() } {
                Ok(()) => break,
                // Somebody else's save came first, or its removal did: look again. But not for ever, and not when it is the
                // finished directory itself that somebody removed.
                Err(Errno::EXIST | Errno::NOTEMPTY | Errno::NOENT) if turn < TURNS && self.is_there() => {}
                Err(error) => {
                    return Err(Error::io("rename the finished checkpoint to", &self.target)(error));
                }
            }
            // A target that is no directory would be met here each time.
            check_target(self.parent.as_fd(), &self.name, &self.target, self.overwrite)?;
        }
        self.committed = true;
        sync(&self.parent, &self.parent_path)?;
        // After an exchange the old checkpoint lies under the temporary name. It is no longer needed, and if removing it
        // fails the next save will sweep it.
        let _ = remove(self.parent.as_fd(), &self.temporary);
        Ok(())
    }

    /// Whether the temporary directory still has its name.
    fn is_there(&self) -> bool {
        fs::statat(&self.parent, &self.temporary, AtFlags::SYMLINK_NOFOLLOW).is_ok()
    }

    /// First save to this name.
    fn publish(&self) -> rustix::io::Result<()> {
        let (parent, from, to) = (&self.parent, &self.temporary, &self.name);
        match fs::renameat_with(parent, from, parent, to, RenameFlags::NOREPLACE) {
            // NFS, Lustre and FUSE refuse the flag. A plain rename replaces nothing but an empty directory.
            Err(Errno::INVAL | Errno::NOSYS) => fs::renameat(parent, from, parent, to),
            other => other,
        }
    }

    /// Save over a checkpoint of this name.
    fn replace(&self) -> rustix::io::Result<()> {
        let (parent, new, name) = (&self.parent, &self.temporary, &self.name);
        match fs::renameat_with(parent, new, parent, name, RenameFlags::EXCHANGE) {
            Err(Errno::INVAL | Errno::NOSYS) => {}
            other => return other,
        }
        // Two steps. Whoever finds the name missing between them waits for this lock, and if it comes free because this process died,
        // puts the old one back (`recover`).
        let aside = temporary_name(name, "old");
        let old = open_child(parent.as_fd(), name).map_err(|_| Errno::NOENT)?;
        let _ = fs::flock(&old, FlockOperation::NonBlockingLockExclusive);
        fs::renameat(parent, name, parent, &aside)?;
        if let Err(error) = fs::renameat(parent, new, parent, name) {
            let _ = fs::renameat(parent, &aside, parent, name);
            return Err(error);
        }
        retry_on_intr(|| fs::fsync(parent))?;
        let _ = remove(parent.as_fd(), &aside);
        Ok(())
    }

    /// Takes files of other people along from the old checkpoint: a `config.json` laid beside the shards stays there.
    fn carry_over(&self, old: BorrowedFd<'_>) -> Result<()> {
        let path = &self.target;
        for (file, _) in entries(old).map_err(Error::io("list", path))? {
            if is_ours(file.to_bytes()) {
                continue;
            }
            match fs::linkat(old, &file, &self.directory, &file, AtFlags::empty()) {
                Ok(()) | Err(Errno::EXIST | Errno::NOENT) => {}
                // No hard links here.
                Err(_) => self.copy_file(old, &file).map_err(Error::io("carry files over from", path))?,
            }
        }
        Ok(())
    }

    fn copy_file(&self, old: BorrowedFd<'_>, name: &std::ffi::CStr) -> io::Result<()> {
        let stat = fs::statat(old, name, AtFlags::SYMLINK_NOFOLLOW)?;
        let from = fs::openat(old, name, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let to = fs::openat(&self.directory, name, flags, Mode::from_raw_mode(stat.st_mode & 0o777))?;
        let (mut from, mut to) = (std::fs::File::from(from), std::fs::File::from(to));
        io::copy(&mut from, &mut to)?;
        to.sync_all()
    }
}

/// A file of a [`Workspace`] that is written, on its way to the disk.
#[derive(Debug)]
#[must_use = "it is not durable yet"]
pub struct SmallFile {
    file: std::fs::File,
    path: PathBuf,
}

impl SmallFile {
    /// Makes it durable.
    pub fn sync(&self) -> Result<()> {
        retry_on_intr(|| fs::fsync(&self.file)).map_err(Error::io("sync", &self.path))
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        if !self.committed {
            let _ = remove(self.parent.as_fd(), &self.temporary);
        }
    }
}

/// Whether the target's name is free, or taken by a checkpoint that may be replaced.
fn check_target(parent: BorrowedFd<'_>, name: &OsStr, target: &Path, overwrite: bool) -> Result<()> {
    for _ in 0..TURNS {
        let before = fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW);
        let outcome = check_target_once(parent, name, target, overwrite);
        // What was looked at may have been replaced meanwhile, and emptied: then the answer says nothing.
        let after = fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW);
        let inode = |stat: rustix::io::Result<fs::Stat>| stat.ok().map(|stat| (stat.st_dev, stat.st_ino));
        if outcome.is_ok() || inode(before) == inode(after) {
            return outcome;
        }
    }
    check_target_once(parent, name, target, overwrite)
}

fn check_target_once(parent: BorrowedFd<'_>, name: &OsStr, target: &Path, overwrite: bool) -> Result<()> {
    let exists = |why: &str| Error::Exists { path: target.to_path_buf(), why: why.to_owned() };
    let stat = match fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(()),
        other => other.map_err(Error::io("look at", target))?,
    };
    if !overwrite {
        return Err(exists("it exists, and overwrite=False"));
    }
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => {}
        FileType::Symlink => return Err(exists("it is a symbolic link: save to the path it points to")),
        _ => return Err(exists("it is a file, not a checkpoint: choose another name")),
    }
    let directory = open_child(parent, name).map_err(Error::io("open", target))?;
    if !has_magic(directory.as_fd()).map_err(Error::io("open the manifest of", target))? {
        return Err(exists("it is a directory, but not a checkpoint of fastckpt: choose another name"));
    }
    for (file, kind) in entries(directory.as_fd()).map_err(Error::io("list", target))? {
        if kind != FileType::RegularFile {
            let what = file.to_string_lossy().into_owned();
            return Err(exists(&format!(
                "it holds `{what}`, which is no plain file: move that elsewhere first"
            )));
        }
    }
    Ok(())
}

/// Whether a directory holds a manifest of fastckpt, of any version, whole or damaged.
fn has_magic(directory: BorrowedFd<'_>) -> io::Result<bool> {
    let mut begin = [0; manifest::MAGIC.len()];
    match open_regular(directory, manifest::FILE) {
        Ok((fd, _)) => {
            let read = retry_on_intr(|| rustix::io::pread(&fd, &mut begin[..], 0))?;
            Ok(read == begin.len() && begin == *manifest::MAGIC)
        }
        // There is none, or something else has its name. Any other failure says nothing about what is there.
        Err(error) if error.raw_os_error() == Some(libc::ELOOP) => Ok(false),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidInput) => {
            Ok(false)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    pub(super) fn checkpoint(parent: &Path, name: &str, text: &str) -> PathBuf {
        let path = parent.join(name);
        let workspace = Workspace::create(&path, true).unwrap();
        let file =
            workspace.write_file(manifest::FILE, format!("{{\"fastckpt\":1,{text}").as_bytes()).unwrap();
        file.sync().unwrap();
        workspace.commit([].into_iter()).unwrap();
        path
    }

    pub(super) fn content(path: &Path) -> String {
        std::fs::read_to_string(path.join(manifest::FILE)).unwrap()
    }

    fn names(path: &Path) -> Vec<String> {
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
        let _ = workspace.write_file("model.safetensors", b"half").unwrap();
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
        assert!(refused(true), "an empty directory");
        std::fs::write(path.join("mine.txt"), "mine").unwrap();
        assert!(refused(true), "somebody's directory");
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
    fn files_of_others_are_carried_over() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        std::fs::write(path.join("config.json"), "{}").unwrap();
        std::fs::write(path.join("model-00001-of-00002.safetensors"), "ours, and stale").unwrap();
        checkpoint(parent.path(), "c", "two");
        assert_eq!(names(&path), ["config.json", "fastckpt.json"]);
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
