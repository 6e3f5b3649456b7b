//! A block between memory and a file. One record passes from the job to worker, backend and ring, and back.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::files::{OpenFile, ShardFile};
use crate::engine::path::{IoPath, Reason};
use crate::format::geometry::{self, PAGE};
use crate::sys::gather::{Buf, Part};
use crate::sys::ring::Payload;
use crate::sys::thread::Backoff;

/// A block that moves in one or more operations. It owns its file and its memory during that time.
///
/// Direct I/O writes whole pages only. The bytes after the last whole page, the tail, go through the page cache in a
/// separate operation. That operation comes first, so that the kernel writes the tail back while the rest moves, and
/// the sync need not wait for it.
#[derive(Debug)]
pub struct Transfer {
    /// Number of the block in its job.
    pub block: usize,
    /// Whether the block is written to the file; otherwise it is read.
    pub write: bool,
    /// The file.
    pub file: Arc<OpenFile>,
    /// The file offset of the first byte of the memory.
    pub offset: u64,
    /// The memory.
    pub buf: Buf,
    /// Bytes of the memory to request, without the tail. With direct I/O, this is a whole number of pages.
    pub len: usize,
    /// How many of these bytes must move. At the end of a file that is read, there are fewer than `len`.
    pub need: usize,
    /// How many of these bytes have moved.
    pub done: usize,
    /// The part of the tail that must still move.
    pub tail: Range<usize>,
    /// The I/O path.
    pub path: IoPath,
    /// Why the block takes this I/O path.
    pub reason: Reason,
    /// Bytes of tensors that the processor copied for this block.
    pub copied: u64,
    /// How often the operation was refused temporarily.
    pub backoff: Backoff,
    /// When the operation in flight was submitted, on the clock of the worker's counters.
    pub submitted: u64,
}

impl Transfer {
    /// Moves all of `buf`. Its first byte belongs at `offset` of the file.
    #[must_use]
    pub fn new(
        block: usize,
        write: bool,
        (file, offset): (Arc<OpenFile>, u64),
        buf: Buf,
        (path, reason): (IoPath, Reason),
    ) -> Self {
        let all = buf.parts().iter().map(Part::len).sum();
        let len = if path == IoPath::Buffered { all } else { geometry::down(all as u64, PAGE) as usize };
        let (need, tail) = (len, len..all);
        Self {
            block,
            write,
            file,
            offset,
            buf,
            len,
            need,
            done: 0,
            tail,
            path,
            reason,
            copied: 0,
            backoff: Backoff::default(),
            submitted: 0,
        }
    }

    /// Fetches the `len` bytes at `offset` of an object. Afterwards, the buffer has them.
    #[must_use]
    pub fn fetch(block: usize, (object, offset): (Arc<OpenFile>, u64), len: usize) -> Self {
        let (buf, path) = (Buf::new(None, Vec::new()), (IoPath::Buffered, Reason::Stored));
        Self { len, need: len, tail: len..len, ..Self::new(block, false, (object, offset), buf, path) }
    }

    /// Whether the current operation bypasses the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.path != IoPath::Buffered && self.tail.is_empty()
    }

    /// The bytes of the memory that the current operation moves.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        if self.tail.is_empty() { self.done..self.len } else { self.tail.clone() }
    }

    /// How many bytes the current operation must move.
    #[must_use]
    pub fn missing(&self) -> usize {
        if self.tail.is_empty() { self.need.saturating_sub(self.done) } else { self.tail.len() }
    }

    /// Records that the current operation moved `moved` bytes.
    pub fn advance(&mut self, moved: usize) {
        self.backoff = Backoff::default();
        if self.tail.is_empty() {
            self.done += moved;
        } else {
            self.tail.start += moved;
        }
    }

    /// Switches from direct I/O to the page cache, which allows any length, for the rest of the block.
    pub fn go_buffered(&mut self, reason: Reason) {
        (self.path, self.reason) = (IoPath::Buffered, reason);
    }

    /// Prepares the rest of the block for submission after a short or failed operation.
    pub fn resume(&mut self) {
        if self.path != IoPath::Buffered && !self.file.is_direct() {
            self.go_buffered(Reason::Refused);
        }
        if self.is_direct() {
            // The rest must start aligned. Moving some bytes twice does no harm.
            self.done = geometry::down(self.done as u64, PAGE) as usize;
        }
    }

    /// Carries out the current operation in the calling thread.
    pub fn carry_out(&mut self) -> io::Result<usize> {
        let (direct, range, offset) = (self.is_direct(), self.range(), self.file_offset());
        let file = match &**self.file {
            ShardFile::Local(file) => file,
            ShardFile::Stored(object) => {
                let bytes = object.read(self.offset, self.need)?;
                let got = (*bytes).as_ref().len();
                self.buf.fetched(bytes);
                if got < self.need {
                    // The object has no more bytes.
                    self.done = got;
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                return Ok(self.need);
            }
        };
        if let Some((map, range)) = self.buf.mapped() {
            map.populate(range).map(|()| range.len())
        } else if self.write {
            file.write_at(direct, &self.buf.slices(range), offset)
        } else {
            file.read_at(direct, &mut self.buf.slices_mut(range), offset)
        }
    }
}

impl Payload for Transfer {
    fn fd(&self) -> io::Result<BorrowedFd<'_>> {
        Ok(self.file.local()?.fd(self.is_direct()))
    }

    fn file_offset(&self) -> u64 {
        self.offset + self.range().start as u64
    }

    fn is_write(&self) -> bool {
        self.write
    }

    fn memory(&mut self) -> (&mut Buf, Range<usize>) {
        let range = self.range();
        (&mut self.buf, range)
    }
}
