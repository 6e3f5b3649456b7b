//! What a block of a save consists of: where its bytes lie, and their checksums.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::part::{self, Bytes, Unsynced};
use crate::commit::Workspace;
use crate::engine::choice::Choice;
use crate::engine::content::Content;
use crate::engine::io::files::{OpenFile, OpenFiles};
use crate::engine::io::transfer::Transfer;
use crate::engine::job::{Job, Staging, new_staging};
use crate::engine::options::{Io, Options};
use crate::engine::path::{IoPath, Reason};
use crate::error::{Error, Result};
use crate::format::checksum;
use crate::format::geometry::{self, Extent, PAGE, STRAIGHT};
use crate::format::layout::{Plan, Shard, TensorSpec};
use crate::format::manifest::{Logical, ShardEntry, TensorEntry};
use crate::sys::file::DataFile;
use crate::sys::gather::{Buf, Part};
use crate::sys::mapping::Stretch;
use crate::sys::memory::Source;
use crate::sys::pagemap::{self, PageMap};
use crate::telemetry::{Lane, State};

/// Bytes of an extent that are written without a copy.
struct Straight {
    /// Their place in the file.
    range: Range<u64>,
    /// Their place in memory.
    memory: Source,
}

impl Straight {
    fn len(&self) -> u64 {
        self.range.end - self.range.start
    }
}

/// An extent, and the part of it that needs no copy.
struct Piece {
    extent: Extent,
    straight: Option<Straight>,
}

/// A block that is ready to be written.
struct Assembled {
    buf: Buf,
    path: IoPath,
    reason: Reason,
    copied: u64,
}

/// Fills blocks from the tensors and records their checksums.
pub(super) struct WriteJob<'a> {
    plan: &'a Plan,
    wanted: &'a part::Part<'a>,
    /// Where each tensor lies; empty if there are `images`.
    contents: &'a [Content],
    /// The shards as they will be on the disk.
    images: &'a [Stretch],
    workspace: &'a Workspace,
    direct: bool,
    strict: bool,
    zero_copy: Option<bool>,
    pages: OnceLock<Option<PageMap>>,
    begin: Instant,
    files: OpenFiles,
    /// Number of the first block of each shard, then the number of all blocks.
    first_block: Vec<usize>,
    /// Number of the first extent of each tensor, then the number of all extents.
    first_extent: Vec<usize>,
    extent_crcs: Vec<AtomicU64>,
    block_crcs: Vec<AtomicU64>,
    /// For each block, the CRC of the bytes that were summed in place and that the write reads again.
    straight_crcs: Vec<AtomicU64>,
    /// The shard of a checkpoint of one block, once it is written.
    unsynced: OnceLock<Arc<OpenFile>>,
    /// When the last block was on the device, in nanoseconds after `begin`. What came later was syncing.
    pub(super) written: AtomicU64,
}

/// The sum before each element, then the sum of all.
fn running_sum(counts: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut all = vec![0];
    all.extend(counts.scan(0, |sum, count| {
        *sum += count;
        Some(*sum)
    }));
    all
}

impl<'a> WriteJob<'a> {
    pub(super) fn new(
        wanted: &'a part::Part<'a>,
        workspace: &'a Workspace,
        choice: &Choice,
        options: &Options,
        begin: Instant,
    ) -> Self {
        let plan = wanted.plan;
        let blocks = plan.shards.iter().enumerate().map(|(index, shard)| {
            if wanted.has(index) { geometry::block_count(shard.bytes, plan.block_size) as usize } else { 0 }
        });
        let blocks: Vec<usize> = blocks.collect();
        let extents = wanted.tensors.iter().zip(&plan.places).map(|(tensor, &(shard, offset))| {
            let bytes = tensor.bytes().filter(|_| wanted.has(shard)).unwrap_or(0);
            geometry::extent_count(offset, bytes, plan.block_size) as usize
        });
        let first_block = running_sum(blocks.iter().copied());
        let first_extent = running_sum(extents);
        let zeros =
            |sums: &[usize]| (0..sums.last().copied().unwrap_or(0)).map(|_| AtomicU64::new(0)).collect();
        let (contents, images) = match wanted.bytes {
            Bytes::Tensors(contents) => (contents, &[][..]),
            Bytes::Images(images) => (&[][..], images),
        };
        Self {
            plan,
            wanted,
            contents,
            images,
            workspace,
            direct: choice.direct(),
            strict: options.io == Io::Direct,
            zero_copy: options.zero_copy,
            pages: OnceLock::new(),
            begin,
            files: OpenFiles::new(blocks),
            extent_crcs: zeros(&first_extent),
            block_crcs: zeros(&first_block),
            straight_crcs: zeros(&first_block),
            first_block,
            first_extent,
            unsynced: OnceLock::new(),
            written: AtomicU64::new(0),
        }
    }

    /// The shard that `block` belongs to, and the offset in it at which the block starts.
    fn locate(&self, block: usize) -> (usize, u64) {
        let shard = self.first_block.partition_point(|&first| first <= block) - 1;
        (shard, (block - self.first_block[shard]) as u64 * self.plan.block_size)
    }

    /// How to write an extent, with direct I/O or through the page cache: the part that needs no copy, or why there is
    /// none.
    fn straight(
        &self,
        shard: &Shard,
        extent: &Extent,
        direct: bool,
    ) -> Result<std::result::Result<Straight, Reason>> {
        let Content::Memory(source) = &self.contents[extent.tensor] else {
            return Ok(Err(Reason::Elsewhere));
        };
        if extent.len < STRAIGHT || (direct && shard.is_short()) {
            return Ok(Err(Reason::Small));
        }
        if direct && self.zero_copy == Some(false) {
            return Ok(Err(Reason::Asked));
        }
        let memory =
            source.part(extent.start as usize, extent.len as usize).ok_or_else(Content::too_short)?;
        let range = geometry::straight(extent.offset, extent.len, memory.address(), direct);
        let skip = (range.start - extent.offset) as usize;
        let memory = memory.part(skip, (range.end - range.start) as usize).filter(|_| !range.is_empty());
        Ok(match memory {
            // Through the page cache the kernel copies anyway, and one copy is enough.
            Some(memory) if !direct || self.is_worth_it(&memory) => Ok(Straight { range, memory }),
            Some(_) => Err(Reason::SmallPages),
            None if extent.len < STRAIGHT + 2 * PAGE => Err(Reason::Small),
            None => Err(Reason::Incongruent),
        })
    }

    /// Whether a device writes `memory` itself faster than a copy of it in a staging buffer. Only huge pages make up
    /// for the copy.
    fn is_worth_it(&self, memory: &Source) -> bool {
        self.zero_copy.unwrap_or_else(|| {
            let map = self.pages.get_or_init(PageMap::open).as_ref();
            pagemap::is_huge(map, memory.address(), memory.bytes().len())
        })
    }

    /// The extents in `block`, with what of each is written without a copy, and the reason why the largest of the
    /// others is not.
    fn pieces(
        &self,
        shard: &Shard,
        block: Range<u64>,
        direct: bool,
        copy_all: bool,
    ) -> Result<(Vec<Piece>, Reason)> {
        let placements = geometry::touching(&shard.placements, block.clone());
        let mut pieces = Vec::with_capacity(placements.len());
        let mut reason = (0, Reason::Small);
        for placement in placements {
            let Some(extent) = geometry::extent(placement, block.start, self.plan.block_size) else {
                continue;
            };
            let straight =
                if copy_all { Err(Reason::Changed) } else { self.straight(shard, &extent, direct)? };
            if let Err(why) = straight {
                reason = if extent.len > reason.0 { (extent.len, why) } else { reason };
            }
            pieces.push(Piece { extent, straight: straight.ok() });
        }
        Ok((pieces, reason.1))
    }

    /// Prepares the `need` bytes of `shard` at `offset` for writing and records their checksums. What cannot be written
    /// without a copy is copied to a staging buffer, in file order. With `copy_all`, everything is.
    fn assemble(
        &self,
        block: usize,
        (shard, offset): (&Shard, u64),
        (need, file): (usize, &DataFile),
        copy_all: bool,
        slab: Staging<'_>,
    ) -> Result<Assembled> {
        if let Some(image) = self.images.get(self.locate(block).0) {
            return self.assemble_image(block, (shard, offset), (need, file), image);
        }
        let end = offset + need as u64;
        let past = file.is_direct();
        let direct = past && need >= PAGE as usize;
        let (pieces, reason) = self.pieces(shard, offset..end, direct, copy_all)?;
        let straight: u64 = pieces.iter().flat_map(|piece| &piece.straight).map(Straight::len).sum();
        let slab_bytes = need - straight as usize;
        let mut slab = if slab_bytes > 0 { Some(slab(slab_bytes)?) } else { None };
        let bytes: &mut [u8] = slab.as_deref_mut().map_or(&mut [], |slab| &mut slab[..slab_bytes]);

        let header =
            shard.header.get(offset as usize..shard.header.len().min(end as usize)).unwrap_or_default();
        bytes[..header.len()].copy_from_slice(header);
        let mut parts = Vec::new();
        // How far the staging buffer is filled, how much of it is in `parts` and how much in `crc`, and the CRC of the
        // block so far.
        let (mut at, mut taken, mut summed, mut crc) = (header.len(), 0, 0, checksum::of(&[]));
        let mut straight_crc = crc;
        for Piece { extent, straight } in &pieces {
            let number = self.first_extent[extent.tensor] + extent.index as usize;
            let edge = straight.as_ref().map_or(extent.len, |s| s.range.start - extent.offset) as usize;
            let before = at;
            at += edge;
            let mut sum = self.copy(extent, 0, &mut bytes[before..at])?;
            if let Some(Straight { range, memory }) = straight {
                if at > taken {
                    parts.push(Part::Slab(taken..at));
                    taken = at;
                }
                parts.push(Part::Source(*memory));
                let (inner, len) = (checksum::of(memory.bytes()), range.end - range.start);
                straight_crc = checksum::combine(straight_crc, inner, len);
                sum = checksum::combine(sum, inner, len);
                let edge = (extent.offset + extent.len - range.end) as usize;
                let after = self.copy(extent, range.end - extent.offset, &mut bytes[at..at + edge])?;
                at += edge;
                sum = checksum::combine(sum, after, edge as u64);
            }
            // Combining the CRCs of small extents would cost more than another pass over bytes in cache.
            if extent.len >= STRAIGHT {
                crc = checksum::append(crc, &bytes[summed..before]);
                crc = checksum::combine(crc, sum, extent.len);
                summed = at;
            }
            self.extent_crcs[number].store(sum, Ordering::Relaxed);
        }
        crc = checksum::append(crc, &bytes[summed..at]);
        self.block_crcs[block].store(crc, Ordering::Relaxed);
        self.straight_crcs[block].store(straight_crc, Ordering::Relaxed);
        let (path, reason) = match (straight > 0, direct) {
            _ if copy_all => (if direct { IoPath::Staged } else { IoPath::Buffered }, Reason::Changed),
            (_, false) => self.buffered(past),
            (true, true) => (IoPath::ZeroCopy, Reason::Possible),
            (false, true) => (IoPath::Staged, reason),
        };
        if at > taken {
            parts.push(Part::Slab(taken..at));
        }
        Ok(Assembled { buf: Buf::new(slab, parts), path, reason, copied: at as u64 })
    }

    /// Prepares a block of a shard's image, which is one stretch of it, and records its checksums.
    fn assemble_image(
        &self,
        block: usize,
        (shard, offset): (&Shard, u64),
        (need, file): (usize, &DataFile),
        image: &Stretch,
    ) -> Result<Assembled> {
        let begin = offset as usize;
        let stretch = image.part(begin..begin + need).ok_or_else(Content::too_short)?;
        // Look only once: each look at a stretch asks the kernel whose memory it is.
        let bytes: &[u8] = &stretch;
        let (mut summed, mut crc) = (0, checksum::of(&[]));
        for placement in geometry::touching(&shard.placements, offset..offset + need as u64) {
            let Some(extent) = geometry::extent(placement, offset, self.plan.block_size) else { continue };
            let start = (extent.offset - offset) as usize;
            let end = start + extent.len as usize;
            let sum = checksum::of(&bytes[start..end]);
            let number = self.first_extent[extent.tensor] + extent.index as usize;
            self.extent_crcs[number].store(sum, Ordering::Relaxed);
            // As above: small extents are summed again while they are in cache.
            if extent.len >= STRAIGHT {
                crc = checksum::append(crc, &bytes[summed..start]);
                crc = checksum::combine(crc, sum, extent.len);
                summed = end;
            }
        }
        crc = checksum::append(crc, &bytes[summed..]);
        self.block_crcs[block].store(crc, Ordering::Relaxed);
        let direct = file.is_direct() && need >= PAGE as usize;
        let (path, reason) =
            if direct { (IoPath::ZeroCopy, Reason::Possible) } else { self.buffered(file.is_direct()) };
        Ok(Assembled { buf: Buf::new(None, vec![Part::Stretch(stretch)]), path, reason, copied: 0 })
    }

    /// Why a block goes through the page cache. `past` tells whether the file is open for direct I/O.
    const fn buffered(&self, past: bool) -> (IoPath, Reason) {
        let reason = match (past, self.direct) {
            (true, _) => Reason::Remainder,
            (false, true) => Reason::Refused,
            (false, false) => Reason::Asked,
        };
        (IoPath::Buffered, reason)
    }

    /// Whether memory of a block changed between its summing and its writing. If so, its bytes in the file have no
    /// known sum.
    fn has_changed(&self, block: usize, buf: &Buf) -> bool {
        // The memory of a snapshot does not change.
        if !self.images.is_empty() {
            return false;
        }
        let straight = buf.parts().iter().filter_map(|part| match part {
            Part::Source(memory) => Some(memory.bytes()),
            _ => None,
        });
        straight.fold(checksum::of(&[]), checksum::append)
            != self.straight_crcs[block].load(Ordering::Relaxed)
    }

    /// A block that is ready to be written. With `copy_all`, it is written again.
    fn transfer(
        &self,
        block: usize,
        file: Arc<OpenFile>,
        copy_all: bool,
        slab: Staging<'_>,
    ) -> Result<Transfer> {
        let (index, offset) = self.locate(block);
        let shard = &self.plan.shards[index];
        let need = geometry::block_len(offset, shard.bytes, self.plan.block_size) as usize;
        let Assembled { buf, path, reason, copied } =
            self.assemble(block, (shard, offset), (need, &file), copy_all, slab)?;
        Ok(Transfer { copied, ..Transfer::new(block, true, (file, offset), buf, (path, reason)) })
    }

    /// Copies bytes of an extent, from `skip` on, and returns their CRC.
    fn copy(&self, extent: &Extent, skip: u64, to: &mut [u8]) -> Result<u64> {
        let start = extent.start + skip;
        match &self.contents[extent.tensor] {
            Content::Memory(source) => {
                let from = source.part(start as usize, to.len()).ok_or_else(Content::too_short)?;
                Ok(checksum::copy(to, from.bytes()))
            }
            Content::Pull(fill) => {
                fill(start, to).map_err(Error::Callback)?;
                Ok(checksum::of(to))
            }
        }
    }

    /// Whether the shard is left unsynced until its manifest is written. A process that joined writes no manifest.
    fn leaves_a_sync(&self) -> bool {
        self.block_crcs.len() == 1 && self.workspace.is_own()
    }

    /// What the workers left to make durable.
    pub(super) fn unsynced(&self) -> Option<Unsynced> {
        let file = Arc::clone(self.unsynced.get()?);
        let shard = &self.plan.shards[self.locate(0).0];
        Some(Unsynced { file, path: self.workspace.path_of(&shard.file), bytes: shard.bytes })
    }

    /// The manifest's entries for the shards and their tensors, after all blocks are written.
    pub(super) fn entries(&self) -> (Vec<ShardEntry>, Vec<TensorEntry>) {
        let load = |crc: &AtomicU64| crc.load(Ordering::Relaxed);
        let shards = self.wanted.shards.iter().map(|&index| {
            let shard = &self.plan.shards[index];
            let crcs = &self.block_crcs[self.first_block[index]..self.first_block[index + 1]];
            let crc = (0..).zip(crcs).fold(checksum::of(&[]), |all, (block, crc)| {
                let len =
                    geometry::block_len(block * self.plan.block_size, shard.bytes, self.plan.block_size);
                checksum::combine(all, load(crc), len)
            });
            shard_entry(shard, crc)
        });
        let tensors = (self.wanted.tensors.iter().zip(&self.plan.places).enumerate())
            .filter(|(_, (_, (shard, _)))| self.wanted.has(*shard));
        let tensors = tensors.map(|(index, (tensor, &place))| {
            let crcs = &self.extent_crcs[self.first_extent[index]..self.first_extent[index + 1]];
            tensor_entry(tensor, place, crcs.iter().map(|crc| checksum::to_hex(load(crc))).collect())
        });
        (shards.collect(), tensors.collect())
    }
}

/// The manifest's entry for a shard.
pub(super) fn shard_entry(shard: &Shard, crc: u64) -> ShardEntry {
    ShardEntry {
        file: shard.file.clone(),
        prefix: shard.prefix.clone(),
        bytes: shard.bytes,
        data_offset: shard.header.len() as u64,
        header_crc: checksum::to_hex(checksum::of(&shard.header)),
        crc: checksum::to_hex(crc),
    }
}

/// The manifest's entry for a tensor.
pub(super) fn tensor_entry(tensor: &TensorSpec, (shard, offset): (usize, u64), crc: String) -> TensorEntry {
    TensorEntry {
        name: tensor.name.clone(),
        dtype: tensor.dtype,
        shape: tensor.shape.clone(),
        shard,
        offset,
        crc,
        logical: tensor.logical.clone().map(|(dtype, shape)| Logical { dtype, shape }),
    }
}

impl Job for WriteJob<'_> {
    const WRITE: bool = true;

    fn blocks(&self) -> usize {
        self.block_crcs.len()
    }

    fn files(&self) -> usize {
        self.wanted.shards.len()
    }

    fn total(&self) -> u64 {
        self.wanted.shards().map(|shard| shard.bytes).sum()
    }

    fn largest(&self) -> usize {
        let longest = self.wanted.shards().map(|shard| shard.bytes).max().unwrap_or(0);
        longest.min(self.plan.block_size).next_multiple_of(PAGE) as usize
    }

    fn file(&self, block: usize) -> usize {
        self.locate(block).0
    }

    fn start(&self, block: usize, staging: Staging<'_>) -> Result<Option<Transfer>> {
        let (index, _) = self.locate(block);
        let shard = &self.plan.shards[index];
        let path = || self.workspace.path_of(&shard.file);
        let file = self.files.acquire(index, || {
            let file = DataFile::open_write(self.workspace.directory(), &shard.file, self.direct);
            let file = file.map_err(|error| Error::io("open", &path())(error))?;
            if self.strict && !file.is_direct() { Err(Error::no_direct(&path())) } else { Ok(file) }
        })?;
        file.map(|file| self.transfer(block, file, false, staging)).transpose()
    }

    fn finish(
        &self,
        transfer: &mut Transfer,
        outcome: io::Result<()>,
        lane: &Lane<'_>,
    ) -> Result<Option<Transfer>> {
        let (index, _) = self.locate(transfer.block);
        let shard = &self.plan.shards[index];
        let path = || self.workspace.path_of(&shard.file);
        outcome.map_err(|error| Error::transfer("write", &path(), error, self.strict))?;
        if self.has_changed(transfer.block, &transfer.buf) {
            return self
                .transfer(transfer.block, Arc::clone(&transfer.file), true, &mut new_staging)
                .map(Some);
        }
        let now = u64::try_from(self.begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.written.fetch_max(now, Ordering::Relaxed);
        lane.moved(geometry::block_len(transfer.offset, shard.bytes, self.plan.block_size));
        if let Some(file) = self.files.release(index) {
            lane.state(State::Fsync);
            if self.leaves_a_sync() {
                // Its manifest follows at once, and a file system that has both makes them durable together.
                let _ = self.unsynced.set(file);
            } else {
                file.sync().map_err(|error| Error::io("sync", &path())(error))?;
                lane.operation().durable(shard.bytes);
            }
        }
        Ok(None)
    }
}
