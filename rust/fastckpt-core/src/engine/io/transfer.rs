//! A block between memory and file: one record from the job through worker, backend and ring, and back.

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use super::files::OpenFile;
use crate::engine::path::{IoPath, Reason};
use crate::format::geometry::{self, PAGE};
use crate::sys::gather::{Buf, Part};
use crate::sys::ring::Payload;

/// A block that moves, in one operation or more; it owns file and memory meanwhile.
///
/// Direct I/O writes whole pages only. The bytes after the last one, the tail, go through the page cache in an
/// operation of their own. It is the first, so that the kernel writes them back beside the rest and the sync need not
/// wait for them.
#[derive(Debug)]
pub struct Transfer {
    /// Number of the block in its job.
    pub block: usize,
    /// To the file, or from it.
    pub write: bool,
    /// The file.
    pub file: Arc<OpenFile>,
    /// Where in the file the first byte of the memory belongs.
    pub offset: u64,
    /// The memory.
    pub buf: Buf,
    /// Bytes of it to ask for, the tail not counted: whole pages with direct I/O.
    pub len: usize,
    /// How many of them must move: fewer at the end of a file that is read.
    pub need: usize,
    /// How many have.
    pub done: usize,
    /// What is left of the tail.
    pub tail: Range<usize>,
    /// The I/O path.
    pub path: IoPath,
    /// Why it is this one.
    pub reason: Reason,
    /// Bytes that the processor copied for it.
    pub copied: u64,
    /// When the operation in flight was submitted, as the worker's counters have it.
    pub submitted: u64,
}

impl Transfer {
    /// Moves all of `buf`, whose first byte belongs at `offset` of the file.
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
            submitted: 0,
        }
    }

    /// Whether the operation that it is at goes past the page cache.
    #[must_use]
    pub fn is_direct(&self) -> bool {
        self.path != IoPath::Buffered && self.tail.is_empty()
    }

    /// The bytes of the memory that this operation is to move.
    #[must_use]
    pub fn range(&self) -> Range<usize> {
        if self.tail.is_empty() { self.done..self.len } else { self.tail.clone() }
    }

    /// How many bytes this operation must move.
    #[must_use]
    pub fn missing(&self) -> usize {
        if self.tail.is_empty() { self.need.saturating_sub(self.done) } else { self.tail.len() }
    }

    /// Notes that this operation moved so many bytes.
    pub fn advance(&mut self, moved: usize) {
        if self.tail.is_empty() {
            self.done += moved;
        } else {
            self.tail.start += moved;
        }
    }

    /// Leaves direct I/O: the rest goes through the page cache, which takes any length.
    pub fn go_buffered(&mut self, reason: Reason) {
        (self.path, self.reason) = (IoPath::Buffered, reason);
    }

    /// Makes the rest ready to be submitted after a short or failed operation.
    pub fn resume(&mut self) {
        if self.path != IoPath::Buffered && !self.file.is_direct() {
            self.go_buffered(Reason::Refused);
        }
        if self.is_direct() {
            // The rest must begin aligned; moving some bytes twice does no harm.
            self.done = geometry::down(self.done as u64, PAGE) as usize;
        }
    }

    /// Carries the operation out on the spot.
    pub fn carry_out(&mut self) -> io::Result<usize> {
        let (direct, range, offset) = (self.is_direct(), self.range(), self.file_offset());
        if let Some((map, range)) = self.buf.mapped() {
            map.populate(range).map(|()| range.len())
        } else if self.write {
            self.file.write_at(direct, &self.buf.slices(range), offset)
        } else {
            self.file.read_at(direct, &mut self.buf.slices_mut(range), offset)
        }
    }
}

impl Payload for Transfer {
    fn fd(&self) -> BorrowedFd<'_> {
        self.file.fd(self.is_direct())
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
