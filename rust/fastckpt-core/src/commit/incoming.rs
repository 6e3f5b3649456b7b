//! A file that is being filled, in pieces that arrive in any order.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;

use crate::format::checksum;
use crate::sys::file::{DataFile, PAGE};
use crate::sys::memory::Bytes;

/// A file with a unique name in a directory. No other process writes to it.
#[derive(Debug)]
pub struct Incoming {
    pub(super) name: String,
    pub(super) file: DataFile,
    /// The length of the file when it was created.
    pub(super) nbytes: u64,
}

impl Incoming {
    /// Creates the file `name` with `nbytes` bytes. The file must not exist.
    pub(super) fn create(
        directory: BorrowedFd<'_>,
        name: &str,
        nbytes: u64,
        direct: bool,
    ) -> io::Result<Self> {
        DataFile::create(directory, name, nbytes, &mut || true)?;
        let file = DataFile::open_write(directory, name, direct)?;
        Ok(Self { name: name.to_owned(), file, nbytes })
    }

    /// Writes `bytes` at `offset` and returns their CRC-64/NVME. Direct I/O writes the aligned part.
    pub(super) fn write(&self, offset: u64, bytes: Bytes<'_>) -> io::Result<u64> {
        let sum = checksum::of_memory(bytes);
        let page = PAGE as usize;
        let aligned = offset.is_multiple_of(PAGE) && bytes.address().is_multiple_of(page);
        let whole = if aligned { bytes.len() / page * page } else { 0 };
        let part = |range: Range<usize>| bytes.part(range.start, range.len()).unwrap_or_default();
        self.put(offset, part(0..whole), true)?;
        self.put(offset + whole as u64, part(whole..bytes.len()), false)?;
        Ok(sum)
    }

    fn put(&self, mut offset: u64, mut bytes: Bytes<'_>, direct: bool) -> io::Result<()> {
        while !bytes.is_empty() {
            // After a short write, the rest may not be aligned.
            let direct = direct && self.file.is_direct() && offset.is_multiple_of(PAGE);
            match self.file.write_at(direct, &[bytes], offset) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(done) => {
                    offset += done as u64;
                    bytes = bytes.part(done, bytes.len() - done).unwrap_or_default();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if direct && error.raw_os_error() == Some(libc::EINVAL) => {
                    self.file.refuse_direct();
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}
