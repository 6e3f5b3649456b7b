//! Shards that are open only while their blocks move. A checkpoint may have more shards than a process may have open
//! files.

use std::io;
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use super::object::Object;
use crate::error::Result;
use crate::sys::file::{self, DataFile};

/// The maximum number of shards that one job has open at a time, each of them twice. By default a process may have
/// 1,024 open files, and the rest of the program needs most of them.
const MOST: usize = 64;

/// The open shards of a job, with one slot for each shard.
#[derive(Debug)]
pub struct OpenFiles {
    slots: Vec<Slot>,
    /// The number of files that are open or being opened.
    open: Arc<AtomicUsize>,
    /// Locked for reading to open a file, and for writing to make sure that no other thread is opening one.
    opening: RwLock<()>,
}

#[derive(Debug)]
struct Slot {
    file: Mutex<Option<Arc<OpenFile>>>,
    blocks_left: AtomicUsize,
}

/// The file or object of a shard.
#[derive(Debug)]
pub enum ShardFile {
    /// A file.
    Local(DataFile),
    /// An object of a store. It is only read.
    Stored(Object),
}

impl ShardFile {
    /// Whether operations on the shard bypass the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        matches!(self, Self::Local(file) if file.is_direct())
    }

    /// The file.
    ///
    /// # Errors
    /// `Unsupported` if the shard is an object.
    pub fn local(&self) -> io::Result<&DataFile> {
        match self {
            Self::Local(file) => Ok(file),
            Self::Stored(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Fills `to` with the bytes at `offset`, through the page cache. Returns the number of bytes read.
    pub fn read_at(&self, to: &mut [u8], offset: u64) -> io::Result<usize> {
        match self {
            Self::Local(file) => file::read_at(file.fd(false), to, offset),
            Self::Stored(object) => {
                let found = object.read(offset, to.len())?;
                let found = (*found).as_ref();
                let len = found.len().min(to.len());
                to[..len].copy_from_slice(&found[..len]);
                Ok(len)
            }
        }
    }
}

/// A shard that is open and counted.
#[derive(Debug)]
pub struct OpenFile {
    // The order matters: the file is closed before it stops counting.
    file: ShardFile,
    _counted: Counted,
}

impl Deref for OpenFile {
    type Target = ShardFile;

    fn deref(&self) -> &ShardFile {
        &self.file
    }
}

#[derive(Debug)]
struct Counted(Arc<AtomicUsize>);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl OpenFiles {
    /// Slots for shards, given the number of blocks of each.
    pub fn new(blocks: impl IntoIterator<Item = usize>) -> Self {
        let slot = |blocks| Slot { file: Mutex::new(None), blocks_left: AtomicUsize::new(blocks) };
        Self {
            slots: blocks.into_iter().map(slot).collect(),
            open: Arc::default(),
            opening: RwLock::default(),
        }
    }

    /// The file of `shard`, which `open` opens for its first block. `None` if it must wait until another file is
    /// closed. The wait always ends: a file is open only for blocks that workers are moving, and these blocks need no
    /// other file to finish.
    pub fn acquire(
        &self,
        shard: usize,
        open: impl Fn() -> Result<ShardFile>,
    ) -> Result<Option<Arc<OpenFile>>> {
        let mut slot = self.slots[shard].file.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &*slot {
            return Ok(Some(Arc::clone(file)));
        }
        let opened = {
            let _shared = self.opening.read().unwrap_or_else(PoisonError::into_inner);
            self.count(MOST).map(|counted| open().map(|file| OpenFile { file, _counted: counted }))
        };
        let file = match opened {
            None => return Ok(None),
            Some(Err(error)) if error.wants_descriptors() => {
                let _alone = self.opening.write().unwrap_or_else(PoisonError::into_inner);
                // No other thread is opening a file now. If this job has none open either, waiting would never end.
                let Some(counted) = self.count(1) else { return Ok(None) };
                OpenFile { file: open()?, _counted: counted }
            }
            Some(other) => other?,
        };
        Ok(Some(Arc::clone(slot.insert(Arc::new(file)))))
    }

    /// Counts one more file, if there are fewer than `most`.
    fn count(&self, most: usize) -> Option<Counted> {
        let more = |open| (open < most).then_some(open + 1);
        self.open.fetch_update(Ordering::AcqRel, Ordering::Acquire, more).ok()?;
        Some(Counted(Arc::clone(&self.open)))
    }

    /// Records that a block of `shard` is done. Returns the file if this was its last block.
    pub fn release(&self, shard: usize) -> Option<Arc<OpenFile>> {
        let slot = &self.slots[shard];
        // Acquire-release: the thread that finishes the last block sees what all other workers did to the file.
        if slot.blocks_left.fetch_sub(1, Ordering::AcqRel) > 1 {
            return None;
        }
        slot.file.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::os::fd::AsFd as _;
    use std::path::Path;

    use super::*;
    use crate::error::Error;
    use crate::sys::file::open_directory;

    /// Opens a file, or fails with `errno` while it is set.
    fn opener<'a>(directory: &'a Path, errno: &'a Cell<Option<i32>>) -> impl Fn() -> Result<ShardFile> + 'a {
        move || {
            if let Some(errno) = errno.get() {
                return Err(Error::io("open", directory)(io::Error::from_raw_os_error(errno)));
            }
            let directory = open_directory(directory).unwrap();
            let _ = DataFile::create(directory.as_fd(), "shard", 1, &mut || true);
            Ok(ShardFile::Local(DataFile::open_write(directory.as_fd(), "shard", false).unwrap()))
        }
    }

    #[test]
    fn a_process_out_of_descriptors_waits_for_files_that_are_open_and_fails_when_none_is() {
        let (directory, errno) = (tempfile::tempdir().unwrap(), Cell::new(None));
        let open = opener(directory.path(), &errno);
        for number in [libc::EMFILE, libc::ENFILE] {
            errno.set(None);
            let files = OpenFiles::new([1, 1, 1]);
            let first = files.acquire(0, &open).unwrap().unwrap();
            errno.set(Some(number));
            assert!(files.acquire(1, &open).unwrap().is_none());
            assert!(files.acquire(0, &open).unwrap().is_some(), "the file is already open");
            drop(files.release(0));
            assert!(files.acquire(1, &open).unwrap().is_none(), "another file is still open");
            drop(first);
            let error = files.acquire(1, &open).unwrap_err();
            assert_eq!(error.errno(), Some(number));
            errno.set(None);
            assert!(files.acquire(1, &open).unwrap().is_some());
            errno.set(Some(libc::EACCES));
            assert_eq!(files.acquire(2, &open).unwrap_err().errno(), Some(libc::EACCES), "no reason to wait");
        }
    }

    #[test]
    fn only_so_many_files_are_open_at_a_time() {
        let (directory, errno) = (tempfile::tempdir().unwrap(), Cell::new(None));
        let open = opener(directory.path(), &errno);
        let files = OpenFiles::new(vec![2; MOST + 1]);
        for shard in 0..MOST {
            assert!(files.acquire(shard, &open).unwrap().is_some());
        }
        assert!(files.acquire(MOST, &open).unwrap().is_none());
        assert!(files.release(7).is_none(), "the file has another block");
        assert!(files.acquire(MOST, &open).unwrap().is_none());
        assert!(files.release(7).is_some());
        assert!(files.acquire(MOST, &open).unwrap().is_some());
    }
}
