//! Prepares units for writing: the places of their bytes, the parts that need no copy, and their checksums.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::work::{Unit, Work, header};
use crate::engine::content::Content;
use crate::engine::io::files::{OpenFile, ShardFile};
use crate::engine::io::transfer::Transfer;
use crate::engine::job::Staging;
use crate::engine::path::{IoPath, Reason};
use crate::error::Result;
use crate::format::checksum::{self, Pair};
use crate::format::geometry::{self, Extent, PAGE, STRAIGHT};
use crate::format::layout::Shard;
use crate::sys::gather::{Buf, Part};
use crate::sys::mapping::Stretch;
use crate::sys::memory::Source;
use crate::sys::pagemap::PageMap;
use crate::sys::slabs::Slab;

/// Bytes of an extent that are written without a copy.
struct Straight {
    /// The file offset of the first byte.
    start: u64,
    /// The memory of these bytes.
    memory: Source,
}

/// An extent, and the parts of it that need no copy, in order.
struct Piece {
    extent: Extent,
    straight: Vec<Straight>,
}

/// A unit under construction, made of a staging buffer and of memory that needs no copy.
struct Filling<'a> {
    bytes: &'a mut [u8],
    parts: Vec<Part>,
    /// How much of the staging buffer is filled, is in `parts`, and is in `crc`.
    at: usize,
    taken: usize,
    summed: usize,
    /// The CRC of the unit so far, and the CRC of its parts that need no copy.
    crc: u64,
    straight_crc: u64,
}

impl<'a> Filling<'a> {
    /// Begins a unit whose staging buffer is filled up to `at`.
    fn new(bytes: &'a mut [u8], at: usize) -> Self {
        let crc = checksum::of(&[]);
        Self { bytes, parts: Vec::new(), at, taken: 0, summed: 0, crc, straight_crc: crc }
    }

    /// Adds the extent at `place` of unit `number`, and records its checksums.
    fn extent<W: Work>(
        &mut self,
        work: &W,
        (number, place): (usize, usize),
        Piece { extent, straight }: &Piece,
    ) -> Result<()> {
        let before = self.at;
        // The file offset up to which the extent is summed, and the checksums so far.
        let (mut reached, mut sum) = (extent.offset, Pair::of(&[]));
        let copy = |to: &mut [u8], from: u64, sum: Pair| {
            let skip = from - extent.offset;
            match (work.copy(number, extent.tensor, extent.start + skip, to)?, skip) {
                (copied, 0) => Ok(copied),
                (copied, _) => Ok(sum.then(copied, to.len() as u64)),
            }
        };
        for Straight { start, memory } in straight {
            sum = copy(self.room(start - reached), reached, sum)?;
            self.take();
            self.parts.push(Part::Source(*memory));
            let (inner, len) = (Pair::of_memory(*memory), memory.len() as u64);
            self.straight_crc = checksum::combine(self.straight_crc, inner.crc, len);
            sum = sum.then(inner, len);
            reached = start + len;
        }
        sum = copy(self.room(extent.offset + extent.len - reached), reached, sum)?;
        // For small extents, combining CRCs would cost more than another pass over bytes in cache.
        if extent.len >= STRAIGHT {
            self.crc = checksum::append(self.crc, &self.bytes[self.summed..before]);
            self.crc = checksum::combine(self.crc, sum.crc, extent.len);
            self.summed = self.at;
        }
        work.summed(number, place, extent, sum);
        Ok(())
    }

    /// The next `len` bytes of the staging buffer.
    fn room(&mut self, len: u64) -> &mut [u8] {
        let start = self.at;
        self.at += len as usize;
        &mut self.bytes[start..self.at]
    }

    /// Adds the filled bytes as a part.
    fn take(&mut self) {
        if self.at > self.taken {
            self.parts.push(Part::Slab(self.taken..self.at));
            self.taken = self.at;
        }
    }

    /// The unit once all its extents have been added.
    fn finished(mut self) -> Self {
        self.crc = checksum::append(self.crc, &self.bytes[self.summed..self.at]);
        self.take();
        self
    }
}

/// A unit that is ready to be written.
pub(super) struct Assembled {
    pub(super) buf: Buf,
    pub(super) path: IoPath,
    pub(super) reason: Reason,
    pub(super) copied: u64,
}

impl Assembled {
    /// Unit `number`, to be written at `start` of `file`.
    pub(super) fn transfer(self, number: usize, file: Arc<OpenFile>, start: u64) -> Transfer {
        let Self { buf, path, reason, copied } = self;
        Transfer { copied, ..Transfer::new(number, true, (file, start), buf, (path, reason)) }
    }
}

/// Fills units and sums them.
pub(super) struct Assembler {
    direct: bool,
    zero_copy: Option<bool>,
    pages: OnceLock<PageMap>,
    /// For each unit, the CRC of bytes that were summed in the tensor's memory and that the write reads again.
    straight_crcs: Vec<AtomicU64>,
}

impl Assembler {
    /// Assembles `units` units that are written with direct I/O, or through the page cache.
    pub(super) fn new(units: usize, direct: bool, zero_copy: Option<bool>) -> Self {
        let straight_crcs = (0..units).map(|_| AtomicU64::new(0)).collect();
        Self { direct, zero_copy, pages: OnceLock::new(), straight_crcs }
    }

    /// The part of a stretch of memory that needs no copy with direct I/O or through the page cache, or why there is
    /// none. The stretch belongs at `offset` of the file.
    fn straight(
        &self,
        shard: &Shard,
        (offset, memory): (u64, Source),
        direct: bool,
    ) -> std::result::Result<Straight, Reason> {
        let len = memory.len() as u64;
        if len < STRAIGHT || (direct && shard.is_short()) {
            return Err(Reason::Small);
        }
        if direct && self.zero_copy == Some(false) {
            return Err(Reason::Asked);
        }
        let range = geometry::straight(offset, len, memory.address(), direct);
        let skip = (range.start - offset) as usize;
        let memory = memory.part(skip, (range.end - range.start) as usize).filter(|_| !range.is_empty());
        match memory {
            // Through the page cache the kernel copies in any case, and one copy is enough.
            Some(memory) if !direct || self.is_worth_it(&memory) => {
                Ok(Straight { start: range.start, memory })
            }
            Some(_) => Err(Reason::SmallPages),
            None if len < STRAIGHT + 2 * PAGE => Err(Reason::Small),
            None => Err(Reason::Incongruent),
        }
    }

    /// Whether a device writes `memory` itself faster than a copy of it in a staging buffer. It does so if the memory
    /// is in huge pages, like the buffer.
    fn is_worth_it(&self, memory: &Source) -> bool {
        self.zero_copy
            .unwrap_or_else(|| self.pages.get_or_init(PageMap::open).is_huge(memory.address(), memory.len()))
    }

    /// The extents in a unit, each with its parts that are written without a copy, and the reason why the largest
    /// extent without such parts has none.
    fn pieces<W: Work>(
        &self,
        work: &W,
        (number, unit): (usize, &Unit),
        direct: bool,
        copy_all: bool,
    ) -> Result<(Vec<Piece>, Reason)> {
        let shard = &work.plan().shards[unit.shard];
        let mut pieces = Vec::new();
        let mut reason = (0, Reason::Small);
        let mut found = Vec::new();
        for extent in work.extents(unit) {
            let mut straight = Vec::new();
            let mut why = Reason::Changed;
            if !copy_all {
                why = Reason::Elsewhere;
                found.clear();
                work.memory(number, &extent, &mut found)?;
                for &stretch in &found {
                    match self.straight(shard, stretch, direct) {
                        Ok(part) => straight.push(part),
                        Err(reason) => why = reason,
                    }
                }
            }
            if straight.is_empty() && extent.len > reason.0 {
                reason = (extent.len, why);
            }
            pieces.push(Piece { extent, straight });
        }
        Ok((pieces, reason.1))
    }

    /// Prepares a unit for writing to `file` and records its checksums. Bytes that cannot be written without a copy are
    /// copied to a staging buffer, in file order. With `copy_all`, all bytes are copied there.
    pub(super) fn assemble<W: Work>(
        &self,
        work: &W,
        (number, unit): (usize, &Unit),
        file: &ShardFile,
        copy_all: bool,
        slab: Staging<'_>,
    ) -> Result<Assembled> {
        let shard = &work.plan().shards[unit.shard];
        if let Some(image) = work.image(unit.shard) {
            return self.assemble_image(work, (number, unit), file, image);
        }
        let (need, past) = (unit.len() as usize, file.is_direct());
        let direct = past && need >= PAGE as usize;
        let (pieces, reason) = self.pieces(work, (number, unit), direct, copy_all)?;
        let straight: usize =
            pieces.iter().flat_map(|piece| &piece.straight).map(|part| part.memory.len()).sum();
        let slab_bytes = need - straight;
        let mut slab = if slab_bytes > 0 { Some(slab(slab_bytes)?) } else { None };
        let bytes: &mut [u8] = slab.as_deref_mut().map_or(&mut [], |slab| &mut slab[..slab_bytes]);

        let header = header(shard, unit);
        bytes[..header.len()].copy_from_slice(header);
        let mut filling = Filling::new(bytes, header.len());
        for (place, piece) in pieces.iter().enumerate() {
            filling.extent(work, (number, place), piece)?;
        }
        let Filling { parts, at, crc, straight_crc, .. } = filling.finished();
        work.assembled(number, crc, straight > 0);
        self.straight_crcs[number].store(straight_crc, Ordering::Relaxed);
        let (path, reason) = match (straight > 0, direct) {
            _ if copy_all => (if direct { IoPath::Staged } else { IoPath::Buffered }, Reason::Changed),
            (_, false) => self.buffered(past),
            (true, true) => (IoPath::ZeroCopy, Reason::Possible),
            (false, true) => (IoPath::Staged, reason),
        };
        Ok(Assembled { buf: Buf::new(slab, parts), path, reason, copied: (at - header.len()) as u64 })
    }

    /// Prepares a unit whose callbacks have copied their bytes to `slab`, at their places in the file. Copies the other
    /// bytes there, too, and records the checksums.
    pub(super) fn assemble_fetched<W: Work>(
        &self,
        work: &W,
        (number, unit): (usize, &Unit),
        file: &ShardFile,
        mut slab: Slab,
    ) -> Result<Assembled> {
        let need = unit.len() as usize;
        // Accessed only once, because each access asks the kernel for the id of this process.
        let bytes = &mut slab[..need];
        let header = header(&work.plan().shards[unit.shard], unit);
        bytes[..header.len()].copy_from_slice(header);
        let given = header.len() as u64 + work.fetched(number).unwrap_or(0);
        work.complete(number, bytes)?;
        self.sum(work, (number, unit), bytes);
        let direct = file.is_direct() && need >= PAGE as usize;
        let (path, reason) =
            if direct { (IoPath::Staged, Reason::Elsewhere) } else { self.buffered(file.is_direct()) };
        Ok(Assembled { buf: Buf::staged(slab, need), path, reason, copied: unit.len() - given })
    }

    /// Records the checksums of a unit whose `bytes` are contiguous and do not change.
    fn sum<W: Work>(&self, work: &W, (number, unit): (usize, &Unit), bytes: &[u8]) {
        let (mut summed, mut crc) = (0, checksum::of(&[]));
        for (place, extent) in work.extents(unit).enumerate() {
            let start = (extent.offset - unit.start) as usize;
            let end = start + extent.len as usize;
            let sum = Pair::of(&bytes[start..end]);
            work.summed(number, place, &extent, sum);
            // As in `Filling::extent`, small extents are summed again while they are in cache.
            if extent.len >= STRAIGHT {
                crc = checksum::append(crc, &bytes[summed..start]);
                crc = checksum::combine(crc, sum.crc, extent.len);
                summed = end;
            }
        }
        crc = checksum::append(crc, &bytes[summed..]);
        work.assembled(number, crc, false);
        self.straight_crcs[number].store(checksum::of(&[]), Ordering::Relaxed);
    }

    /// Prepares a unit of a shard's image, which is one stretch of the image, and records its checksums.
    fn assemble_image<W: Work>(
        &self,
        work: &W,
        (number, unit): (usize, &Unit),
        file: &ShardFile,
        image: &Stretch,
    ) -> Result<Assembled> {
        let range = unit.start as usize..unit.end as usize;
        let stretch = image.part(range).ok_or_else(Content::too_short)?;
        // Accessed only once, because each access asks the kernel for the id of this process.
        let bytes: &[u8] = &stretch;
        self.sum(work, (number, unit), bytes);
        let direct = file.is_direct() && bytes.len() >= PAGE as usize;
        let (path, reason) =
            if direct { (IoPath::ZeroCopy, Reason::Possible) } else { self.buffered(file.is_direct()) };
        Ok(Assembled { buf: Buf::new(None, vec![Part::Stretch(stretch)]), path, reason, copied: 0 })
    }

    /// The reason why a unit goes through the page cache. `past` is whether the file is open for direct I/O.
    const fn buffered(&self, past: bool) -> (IoPath, Reason) {
        let reason = match (past, self.direct) {
            (true, _) => Reason::Remainder,
            (false, true) => Reason::Refused,
            (false, false) => Reason::Asked,
        };
        (IoPath::Buffered, reason)
    }

    /// Whether memory of a unit changed between the computation of its checksums and the write. If so, the checksum of
    /// its bytes in the file is unknown. The memory of an image does not change.
    pub(super) fn has_changed(&self, number: usize, buf: &Buf) -> bool {
        let straight = buf.parts().iter().filter_map(|part| match part {
            Part::Source(memory) => Some(*memory),
            _ => None,
        });
        let append =
            |crc, memory: Source| checksum::combine(crc, checksum::of_memory(memory), memory.len() as u64);
        straight.fold(checksum::of(&[]), append) != self.straight_crcs[number].load(Ordering::Relaxed)
    }
}
