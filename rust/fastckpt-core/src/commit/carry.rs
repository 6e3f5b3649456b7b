//! Files that a workspace takes from another directory. They are linked, or copied if there are no hard links.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

use rustix::fs::{self, AtFlags, FileType, Mode, OFlags};
use rustix::io::Errno;

use super::content::{ON_ITS_WAY, is_ours, is_remnant};
use super::directory::{entries, id};
use super::workspace::Workspace;
use crate::error::{Error, Result};
use crate::format::groups::is_shard_name;

impl Workspace {
    /// Carries over the files in the old checkpoint that fastckpt did not write: a `config.json` beside the shards must
    /// survive, unless this save was given another. Returns whether any of them was missing here or has changed since.
    pub(super) fn carry_over(&self, old: BorrowedFd<'_>) -> Result<bool> {
        let path = &self.target;
        let mut brought = false;
        for (file, kind) in entries(old).map_err(Error::io("list", path))? {
            let ours = is_ours(file.to_bytes()) || is_remnant(file.to_bytes());
            if ours || self.was_given(file.to_bytes()) || kind != FileType::RegularFile {
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

    /// Whether the caller gave this save a file called `name`.
    fn was_given(&self, name: &[u8]) -> bool {
        let sealed = self.own.as_ref().and_then(|own| own.sealed.as_ref());
        sealed.is_some_and(|files| files.iter().any(|(file, _)| file.as_bytes() == name))
    }

    /// Carries over one file. It replaces an older version of the file.
    fn bring(&self, old: BorrowedFd<'_>, file: &CStr) -> io::Result<bool> {
        let there = fs::statat(old, file, AtFlags::SYMLINK_NOFOLLOW)?;
        let same = |here: fs::Stat| {
            let facts = |stat: &fs::Stat| (stat.st_size, stat.st_mtime, stat.st_mtime_nsec);
            id(&here) == id(&there) || facts(&here) == facts(&there)
        };
        if fs::statat(self.directory(), file, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(same) {
            return Ok(false);
        }
        // The file is completed under another name first: the next attempt must not take a truncated file for the whole
        // one.
        let _ = fs::unlinkat(self.directory(), ON_ITS_WAY, AtFlags::empty());
        take(old, file, self.directory(), ON_ITS_WAY)?;
        fs::renameat(self.directory(), ON_ITS_WAY, self.directory(), file)?;
        Ok(true)
    }

    /// Takes over the shard `file`, of `bytes` bytes, as `name`. It comes from the checkpoint in the directory `from`,
    /// whose path is for messages. Its bytes are durable when this returns. Its name is durable when the workspace is
    /// published, like those of all shards.
    pub fn link(
        &self,
        (from, path): (BorrowedFd<'_>, &Path),
        file: &str,
        name: &str,
        bytes: u64,
    ) -> Result<()> {
        if !is_shard_name(name) {
            return Err(self.refused("link a shard into", &format!("`{name}` is not the name of a shard")));
        }
        let path = path.join(file);
        let text = |text: &str| {
            CString::new(text).map_err(|_| self.refused("link a shard into", "a name is not one"))
        };
        let (file, name) = (text(file)?, text(name)?);
        take(from, &file, self.directory(), &name).map_err(Error::io("link", &path))?;
        let stat = fs::statat(self.directory(), &name, AtFlags::SYMLINK_NOFOLLOW);
        let stat = stat.map_err(Error::io("look at the link of", &path))?;
        if stat.st_mode & libc::S_IFMT != libc::S_IFREG || u64::try_from(stat.st_size) != Ok(bytes) {
            let _ = fs::unlinkat(self.directory(), &name, AtFlags::empty());
            return Err(Error::corrupt(
                &path,
                format!("it has {} bytes, written were {bytes}", stat.st_size),
            ));
        }
        Ok(())
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

/// Copies a file durably. If the file system shares blocks between files, the copy takes no space.
fn copy(from: BorrowedFd<'_>, file: &CStr, to: BorrowedFd<'_>, name: &CStr) -> io::Result<()> {
    let source = fs::openat(from, file, OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    let mut source = File::from(source);
    let about = source.metadata()?;
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let mut copy = File::from(fs::openat(to, name, flags, Mode::from_raw_mode(about.mode() & 0o777))?);
    let mut transfer = || {
        io::copy(&mut source, &mut copy)?;
        copy.set_modified(about.modified()?)?;
        copy.sync_all()
    };
    transfer().inspect_err(|_| {
        let _ = fs::unlinkat(to, name, AtFlags::empty());
    })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

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
        // A failed copy leaves nothing.
        std::fs::create_dir(path("d")).unwrap();
        assert!(copy(directory, c"d", directory, c"e").is_err());
        assert!(!path("e").exists());
    }
}
