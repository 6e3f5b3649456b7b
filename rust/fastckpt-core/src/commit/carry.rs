//! Files that a workspace takes from another directory, as hard links or, if that is impossible, as copies.

use std::ffi::CStr;
use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::io::{Errno, retry_on_intr};

use super::content::{ON_ITS_WAY, files, in_training, is_ours, is_remnant};
use super::directory::id;
use super::workspace::Workspace;
use crate::error::{Error, LINK, Result};
use crate::format::groups::is_shard_name;
use crate::sys::calls::{self, Closing};
use crate::sys::file::{Located, sync};
use crate::sys::fs::{self, AtFlags, FileType, Mode, OFlags, Timespec, Timestamps};

impl Workspace {
    /// Carries over the files in the old checkpoint that fastckpt did not write: a `config.json` beside the shards must
    /// survive, unless this save received a new one. Returns whether any file was missing here or has changed since.
    pub(super) fn carry_over(&self, old: BorrowedFd<'_>) -> Result<bool> {
        let path = &self.target;
        let mut brought = false;
        let found = files(old).map_err(Error::io("list", path))?;
        for (file, kind) in &found.all {
            let ours = found.has_own(file) || is_remnant(file) || in_training(file).is_some();
            if ours || self.has_new(file) || *kind != FileType::RegularFile {
                continue;
            }
            match self.bring(old, file) {
                Ok(new) => brought |= new,
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {} // removed meanwhile
                Err(error) => return Err(Error::io("carry files over from", path)(error)),
            }
        }
        Ok(brought)
    }

    /// Whether this save itself has a file called `name`: a file passed to it, or a shard.
    fn has_new(&self, name: &CStr) -> bool {
        let sealed = self.own.as_ref().and_then(|own| own.sealed.as_ref());
        let given =
            sealed.is_some_and(|files| files.iter().any(|(file, _)| file.as_bytes() == name.to_bytes()));
        given
            || (is_ours(name.to_bytes())
                && fs::statat(self.directory(), name, AtFlags::SYMLINK_NOFOLLOW).is_ok())
    }

    /// Carries over one file. Replaces an older version of the file.
    fn bring(&self, old: BorrowedFd<'_>, file: &CStr) -> io::Result<bool> {
        let there = fs::statat(old, file, AtFlags::SYMLINK_NOFOLLOW)?;
        let same = |here: fs::Stat| {
            let facts = |stat: &fs::Stat| (stat.st_size, stat.st_mtime, stat.st_mtime_nsec);
            id(&here) == id(&there) || facts(&here) == facts(&there)
        };
        if fs::statat(self.directory(), file, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(same) {
            return Ok(false);
        }
        // The file is completed under another name first, so that the next attempt does not take a truncated file for a
        // whole one.
        let _ = fs::unlinkat(self.directory(), ON_ITS_WAY, AtFlags::empty());
        take(old, file, self.directory(), ON_ITS_WAY)?;
        fs::renameat(self.directory(), ON_ITS_WAY, self.directory(), file)?;
        Ok(true)
    }

    /// Links a shard of another checkpoint under the temporary name `name` (see `settle`): the file `file` in the
    /// directory `from`, which is open as `open`. `name` becomes a hard link, or a copy that shares its blocks. Fails
    /// if the file system supports neither. A link is as durable as `open`, and a copy is durable. The name becomes
    /// durable when the workspace is published, like the names of all shards. `path`, the path of the other checkpoint,
    /// is for messages.
    pub fn link(
        &self,
        (from, path): (BorrowedFd<'_>, &Path),
        (file, open): (&str, BorrowedFd<'_>),
        name: &str,
    ) -> Result<()> {
        let path = path.join(file);
        let linked = Located::find(from, file).and_then(|file| {
            match fs::linkat(file.directory(), file.name, self.directory(), name, AtFlags::empty()) {
                Ok(()) => self.is_same(name, open).inspect_err(|_| self.unlink(name)),
                Err(Errno::EXIST) => Err(Errno::EXIST.into()),
                // The file has too many links or another owner, or the file system has no hard links.
                Err(error) => self.clone_blocks(open, name).map_err(|_| error.into()),
            }
        });
        linked.map_err(Error::io(LINK, &path))
    }

    /// Checks that the new `name` links to `open`, and not to a file that replaced it.
    fn is_same(&self, name: &str, open: BorrowedFd<'_>) -> io::Result<()> {
        let here = fs::statat(self.directory(), name, AtFlags::SYMLINK_NOFOLLOW)?;
        if id(&here) == id(&fs::fstat(open)?) { Ok(()) } else { Err(Errno::STALE.into()) }
    }

    /// Makes `name`, a durable copy of `open` that shares its blocks.
    fn clone_blocks(&self, open: BorrowedFd<'_>, name: &str) -> io::Result<()> {
        let about = fs::fstat(open)?;
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let copy = fs::openat(self.directory(), name, flags, Mode::from_raw_mode(about.st_mode & 0o777))?;
        let clone = || {
            fs::ioctl_ficlone(&copy, open)?;
            let time = Timespec { tv_sec: about.st_mtime, tv_nsec: about.st_mtime_nsec.cast_signed() };
            fs::futimens(&copy, &Timestamps { last_access: time, last_modification: time })?;
            retry_on_intr(|| fs::fsync(&copy))
        };
        Ok(clone().inspect_err(|_| self.unlink(name))?)
    }

    /// Takes over `file`, which is durable, from the directory `from`, where a copy is gathered. Without hard links,
    /// the file is moved out of that directory.
    pub(super) fn take_gathered(&self, from: BorrowedFd<'_>, file: &str) -> io::Result<()> {
        let (from, to) = (Located::find(from, file)?, Located::make(self.directory(), file)?);
        match fs::linkat(from.directory(), from.name, to.directory(), to.name, AtFlags::empty()) {
            Ok(()) => Ok(()),
            Err(error @ (Errno::NOENT | Errno::STALE | Errno::EXIST)) => Err(error.into()),
            Err(_) => Ok(fs::renameat(from.directory(), from.name, to.directory(), to.name)?),
        }
    }

    /// Gives a shard that was linked from the base its name in this checkpoint.
    pub(crate) fn settle(&self, name: &str, shard: &str) -> Result<()> {
        if !is_shard_name(shard) {
            return Err(self.refused("link a shard into", &format!("`{shard}` is not the name of a shard")));
        }
        let renamed = Located::make(self.directory(), shard)
            .and_then(|to| Ok(fs::renameat(self.directory(), name, to.directory(), to.name)?));
        renamed.map_err(Error::io("name the linked file", &self.path_of(shard)))
    }

    /// Removes `name`, which is no longer needed.
    pub(crate) fn unlink(&self, name: &str) {
        let _ = fs::unlinkat(self.directory(), name, AtFlags::empty());
    }
}

/// Makes the file `file` in `from` available as `name` in `to`, as a hard link or, if there are none, as a copy.
fn take(from: BorrowedFd<'_>, file: &CStr, to: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    match fs::linkat(from, file, to, name, AtFlags::empty()) {
        Ok(()) => Ok(()),
        Err(error @ (Errno::NOENT | Errno::STALE | Errno::EXIST)) => Err(error.into()),
        // There are no hard links here.
        Err(_) => copy(from, file, to, name),
    }
}

/// Bytes that are copied in one call: few enough that the call returns promptly on slow storage.
const PIECE: u64 = if cfg!(test) { 3 } else { 1 << 28 };

/// Copies a file durably. If the file system shares blocks between files, the copy takes no space.
fn copy(from: BorrowedFd<'_>, file: &CStr, to: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    let source = fs::openat(from, file, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let source = Closing::from(File::from(source));
    let call = calls::on("look at", source.as_fd());
    let about = source.metadata()?;
    drop(call);
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let copy = fs::openat(to, name, flags, Mode::from_raw_mode(about.mode() & 0o777))?;
    let copy = Closing::from(File::from(copy));
    let transfer = || {
        let copied = || {
            let _call = calls::on("copy", source.as_fd());
            io::copy(&mut (&*source).take(PIECE), &mut &*copy)
        };
        while copied()? > 0 {}
        let call = calls::on("set the times of", copy.as_fd());
        copy.set_modified(about.modified()?)?;
        drop(call);
        sync(copy.as_fd())
    };
    transfer().inspect_err(|_| {
        let _ = fs::unlinkat(to, name, AtFlags::empty());
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::file::open_directory;

    #[test]
    fn a_copy_is_the_file_with_its_time_and_a_name_that_is_taken_stays() {
        let parent = tempfile::tempdir().unwrap();
        let path = |name: &str| parent.path().join(name);
        std::fs::write(path("a"), "text").unwrap();
        File::open(path("a")).unwrap().set_modified(std::time::UNIX_EPOCH).unwrap();
        let directory = open_directory(parent.path()).unwrap();
        let directory = directory.as_fd();
        copy(directory, c"a", directory, c"b").unwrap();
        let about = std::fs::metadata(path("b")).unwrap();
        assert_eq!((about.modified().unwrap(), about.nlink()), (std::time::UNIX_EPOCH, 1));
        std::fs::write(path("c"), "other").unwrap();
        for take in [copy, take] {
            assert_eq!(
                take(directory, c"a", directory, c"c").unwrap_err().kind(),
                io::ErrorKind::AlreadyExists
            );
        }
        assert_eq!(std::fs::read_to_string(path("b")).unwrap(), "text");
        assert_eq!(std::fs::read_to_string(path("c")).unwrap(), "other");
        // A failed copy leaves no file.
        std::fs::create_dir(path("d")).unwrap();
        assert!(copy(directory, c"d", directory, c"e").is_err());
        assert!(!path("e").exists());
    }
}
