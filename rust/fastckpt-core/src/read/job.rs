//! The pieces of the blocks of a read, and their destinations.

use std::io;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::checkpoint::Checkpoint;
use super::plan::{Due, Piece, PieceDestination, Plan, Share};
use crate::engine::content;
use crate::engine::io::files::{OpenFiles, ShardFile};
use crate::engine::io::object::{GAP, RANGE};
use crate::engine::io::transfer::Transfer;
use crate::engine::job::{Job, Next, Staging, Start};
use crate::engine::options::{Io, Options};
use crate::engine::path::{IoPath, Reason};
use crate::engine::report::Damage;
use crate::error::{Error, Result};
use crate::format::checksum;
use crate::format::geometry::{self, PAGE, STRAIGHT};
use crate::format::manifest::ShardEntry;
use crate::sys::dealt::Dealt;
use crate::sys::file::DataFile;
use crate::sys::gather::{Buf, Part};
use crate::sys::memory::Region;
use crate::sys::pagemap::PageMap;
use crate::telemetry::{Lane, State};

/// The number of blocks that the kernel reads ahead on request: 64 MiB.
const AHEAD: usize = 16;

/// What to do about damage.
pub(super) enum Outcome {
    /// The first damage ends the operation.
    Raise,
    /// All damage is recorded, and the operation continues.
    Collect(Mutex<Vec<Damage>>),
}

/// The checksum of a part of an extent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sum {
    /// Index of the tensor.
    pub tensor: usize,
    /// First byte, counted in the file.
    pub offset: u64,
    /// Number of bytes.
    pub len: u64,
    /// The CRC of these bytes.
    pub crc: u64,
}

/// Ends waits.
pub type Stop<'a> = &'a (dyn Fn() + Sync);

/// Reads blocks and hands their pieces to their destinations.
pub(super) struct ReadJob<'a> {
    checkpoint: &'a Checkpoint,
    direct: bool,
    io: Io,
    zero_copy: Option<bool>,
    /// Whether to bypass the page cache, because the bytes on the device are needed.
    pub(super) from_device: bool,
    /// Whether the kernel reads ahead on request: its own requests are too short for remote storage.
    ahead: bool,
    pages: OnceLock<PageMap>,
    pub(super) outcome: Outcome,
    files: OpenFiles,
    pub(super) plan: Plan,
    pub(super) shards: Vec<usize>,
    /// Checksums of parts of extents.
    pub(super) sums: Mutex<Vec<Sum>>,
    /// Ends the waits of destinations, if they may wait for other processes.
    pub(super) stop: Option<Stop<'a>>,
}

impl<'a> ReadJob<'a> {
    pub(super) fn new(
        checkpoint: &'a Checkpoint,
        mut plan: Plan,
        (direct, options): (bool, &Options),
        outcome: Outcome,
    ) -> Self {
        if checkpoint.is_stored() {
            plan.join(RANGE.max(checkpoint.body.block_size), GAP);
        }
        let mut counts = vec![0; checkpoint.body.shards.len()];
        for block in &plan.blocks {
            counts[block.shard] += 1;
        }
        let shards = plan.shards();
        Self {
            checkpoint,
            direct,
            io: options.io,
            zero_copy: options.zero_copy,
            from_device: false,
            ahead: !direct && options.io == Io::Auto && checkpoint.is_far(),
            pages: OnceLock::new(),
            outcome,
            files: OpenFiles::new(counts),
            plan,
            shards,
            sums: Mutex::default(),
            stop: None,
        }
    }

    /// Records damage to one piece, or raises it.
    fn damaged(&self, shard: &ShardEntry, piece: &Piece, reason: String) -> Result<()> {
        let damage = Damage {
            file: shard.file.clone(),
            offset: piece.offset,
            len: piece.len as u64,
            tensor: Some(self.checkpoint.body.tensors[piece.tensor].name().to_owned()),
            reason,
        };
        match &self.outcome {
            Outcome::Raise => Err(self.checkpoint.raised(damage)),
            Outcome::Collect(all) => {
                all.lock().unwrap_or_else(PoisonError::into_inner).push(damage);
                Ok(())
            }
        }
    }

    /// Passes to a piece its bytes from `place` of a staging buffer on, either all of them or only its edges, and
    /// compares the result with the checksum. Records the bytes for callbacks. Returns the number of bytes copied.
    fn deliver(
        &self,
        shard: &ShardEntry,
        piece: &mut Piece,
        (parts, slab, place): (&[Part], &[u8], usize),
        due: &mut Vec<Due>,
    ) -> Result<u64> {
        let slab = slab.get(place..).unwrap_or_default();
        let check = piece.crc.is_some() || piece.sum;
        let copy = |to: &mut Region, from: &[u8]| {
            if check {
                return checksum::copy(to, from);
            }
            to.copy_from_slice(from);
            0
        };
        let bytes = |len: usize| &slab[..len];
        let (found, copied) = match &mut piece.destination {
            PieceDestination::Memory(region) => (copy(region, bytes(piece.len)), piece.len),
            PieceDestination::Edges { before, part, after } => {
                let (from, rest) = bytes(before.len() + after.len()).split_at(before.len());
                let (head, tail) = (copy(before, from), copy(after, rest));
                let middle = match &parts[*part] {
                    Part::Region(region) if check => {
                        let sum = checksum::append(head, region);
                        checksum::combine(sum, tail, after.len() as u64)
                    }
                    _ => 0,
                };
                (middle, before.len() + after.len())
            }
            PieceDestination::Mapped(map) if check => {
                let start = piece.offset as usize;
                (checksum::of(map.bytes(start..start + piece.len)), 0)
            }
            PieceDestination::Mapped(_) => (0, 0),
            _ if check => (checksum::of(bytes(piece.len)), 0),
            _ => (0, 0),
        };
        self.compare(shard, piece, found)?;
        match &mut piece.destination {
            PieceDestination::Strided(_) | PieceDestination::Push(..) | PieceDestination::Take(_) => {
                give(&mut piece.destination, piece.start, (bytes(piece.len), place), due)
            }
            PieceDestination::Shares(shares) => {
                let mut copied = 0;
                for Share { start, len, destination } in shares {
                    let at = (*start - piece.start) as usize;
                    copied += give(destination, *start, (&bytes(piece.len)[at..at + *len], place + at), due)?;
                }
                Ok(copied)
            }
            _ => Ok(copied as u64),
        }
    }

    /// Makes the kernel read the blocks that follow `block` in its shard before all readers wait for them.
    fn read_ahead(&self, block: usize, file: &DataFile) {
        let (blocks, shard) = (&self.plan.blocks, self.plan.blocks[block].shard);
        let next = if block > 0 && blocks[block - 1].shard == shard { block + AHEAD } else { block };
        for read in blocks.iter().take(block + AHEAD + 1).skip(next).filter(|read| read.shard == shard) {
            file.read_ahead(read.start, read.end);
        }
    }

    fn compare(&self, shard: &ShardEntry, piece: &Piece, found: u64) -> Result<()> {
        if piece.sum {
            let sum = Sum { tensor: piece.tensor, offset: piece.offset, len: piece.len as u64, crc: found };
            self.sums.lock().unwrap_or_else(PoisonError::into_inner).push(sum);
        }
        match piece.crc {
            Some(wanted) if wanted != found => self.damaged(shard, piece, checksum::differs(found, wanted)),
            _ => Ok(()),
        }
    }

    /// Takes from the pieces the memory that `[start, end)` fills without a copy. Returns the parts of the transfer,
    /// the number of bytes of a staging buffer for the rest, and the reason of the largest piece that needs one.
    fn lay_out(
        &self,
        pieces: &mut [Piece],
        (start, end): (u64, u64),
        direct: bool,
    ) -> (Vec<Part>, usize, Reason) {
        let apart = pieces.is_sorted_by(|a, b| a.offset + a.len as u64 <= b.offset);
        let mut parts = Vec::new();
        // The ends of the parts so far, in the file and in the staging buffer.
        let (mut at, mut staged) = (start, 0);
        let mut reason = (0, Reason::Small);
        for piece in pieces {
            // If bytes are wanted twice, every destination gets them from the staging buffer.
            let found = if apart { self.straight(piece, direct) } else { Err(Reason::Small) };
            let range = match found {
                Ok(range) => range,
                Err(why) => {
                    reason = if piece.len > reason.0 { (piece.len, why) } else { reason };
                    continue;
                }
            };
            let PieceDestination::Memory(region) = &mut piece.destination else { continue };
            let before = region.split_off_front((range.start - piece.offset) as usize);
            let middle = region.split_off_front((range.end - range.start) as usize);
            let after = region.take();
            if range.start > at {
                let len = (range.start - at) as usize;
                parts.push(Part::Slab(staged..staged + len));
                staged += len;
            }
            piece.destination = PieceDestination::Edges { before, part: parts.len(), after };
            parts.push(Part::Region(middle));
            at = range.end;
        }
        if end > at {
            let len = (end - at) as usize;
            parts.push(Part::Slab(staged..staged + len));
            staged += len;
        }
        (parts, staged, reason.1)
    }

    /// Whether direct I/O was required and this error is its refusal, which is not damage.
    fn refuses(&self, error: &io::Error) -> bool {
        self.io == Io::Direct && error.raw_os_error() == Some(libc::EINVAL)
    }

    /// The bytes of the file that fill the memory of a piece without a copy, or the reason why none do.
    fn straight(&self, piece: &Piece, direct: bool) -> std::result::Result<Range<u64>, Reason> {
        let region = match &piece.destination {
            PieceDestination::Memory(region) => region,
            PieceDestination::Nowhere => return Err(Reason::Checked),
            PieceDestination::Shares(_) if piece.len as u64 >= STRAIGHT => return Err(Reason::Shares),
            _ => return Err(Reason::Elsewhere),
        };
        if (piece.len as u64) < STRAIGHT {
            return Err(Reason::Small);
        }
        // Without this, a page fault for each page inside the read would cost as much as the read.
        region.populate();
        if direct && self.zero_copy == Some(false) {
            return Err(Reason::Asked);
        }
        let range = geometry::straight(piece.offset, piece.len as u64, region.address(), direct);
        if range.is_empty() {
            let small = (piece.len as u64) < STRAIGHT + 2 * PAGE;
            return Err(if small { Reason::Small } else { Reason::Incongruent });
        }
        let huge = || self.pages.get_or_init(PageMap::open).is_huge(region.address(), region.len());
        if direct && !self.zero_copy.unwrap_or_else(huge) { Err(Reason::SmallPages) } else { Ok(range) }
    }
}

/// Passes the `bytes` of a tensor, from byte `start` of the tensor on, to a plain destination. They are at `place` of a
/// staging buffer. Records what callbacks take. Returns the number of bytes copied.
fn give(
    destination: &mut PieceDestination,
    start: u64,
    (bytes, place): (&[u8], usize),
    due: &mut Vec<Due>,
) -> Result<u64> {
    match destination {
        PieceDestination::Memory(region) => {
            region.copy_from_slice(bytes);
            Ok(bytes.len() as u64)
        }
        PieceDestination::Strided(strided) => Ok(strided.fill(start, bytes)),
        PieceDestination::Push(to, rows) => {
            due.push(Due { to: to.clone(), rows: rows.clone(), start, at: place..place + bytes.len() });
            Ok(0)
        }
        PieceDestination::Take(take) => take(start, bytes).map(|()| 0),
        PieceDestination::Edges { .. }
        | PieceDestination::Mapped(_)
        | PieceDestination::Nowhere
        | PieceDestination::Shares(_) => Ok(0),
    }
}

impl Due {
    fn range(&self) -> Range<u64> {
        self.start..self.start + self.at.len() as u64
    }

    /// The bytes of the rows from a staging buffer, one after another; `None` if they are contiguous there.
    fn pack(&self, slab: &[u8]) -> Option<Vec<u8>> {
        let (rows, _) = self.rows.as_ref()?;
        let len = rows.bytes_in(&self.range()) as usize;
        (len < self.at.len()).then(|| {
            let mut packed = vec![0; len];
            rows.pack(self.start, &slab[self.at.clone()], &mut packed);
            packed
        })
    }

    /// The contiguous ranges of the destination: the first byte and the length of each.
    fn runs(&self) -> Vec<(u64, usize)> {
        match &self.rows {
            Some((rows, base)) => rows.runs(*base, self.range()),
            None => vec![(self.start, self.at.len())],
        }
    }
}

impl Job for ReadJob<'_> {
    const WRITE: bool = false;

    fn calls(&self) -> bool {
        self.plan.calls
    }

    fn waits(&self) -> bool {
        self.stop.is_some()
    }

    fn is_stored(&self) -> bool {
        self.checkpoint.is_stored()
    }

    fn stop(&self) {
        if let Some(stop) = self.stop {
            stop();
        }
    }

    fn blocks(&self) -> usize {
        self.plan.blocks.len()
    }

    fn files(&self) -> usize {
        self.shards.len()
    }

    fn total(&self) -> u64 {
        self.plan.read
    }

    fn file(&self, block: usize) -> usize {
        self.plan.blocks[block].shard
    }

    fn largest(&self) -> usize {
        let spans = self
            .plan
            .blocks
            .iter()
            .map(|read| read.end.next_multiple_of(PAGE) - geometry::down(read.start, PAGE));
        spans.max().unwrap_or(0) as usize
    }

    fn start(&self, block: usize, _: &mut Option<Dealt>, slab: Staging<'_>) -> Result<Start> {
        let read = &self.plan.blocks[block];
        let shard = &self.checkpoint.body.shards[read.shard];
        let file = self.files.acquire(read.shard, || {
            let path = || self.checkpoint.path_of(&shard.file);
            let file = match &self.outcome {
                Outcome::Raise => self.checkpoint.open_shard(read.shard, self.direct)?,
                // The wrong length has been recorded. The bytes that exist can still be read.
                Outcome::Collect(_) => self
                    .checkpoint
                    .open_file(read.shard, self.direct)
                    .map(|(file, _)| file)
                    .map_err(|error| self.checkpoint.unreadable(&path(), error))?,
            };
            if self.io == Io::Direct && !file.is_direct() { Err(Error::no_direct(&path())) } else { Ok(file) }
        })?;
        let Some(file) = file else { return Ok(Start::Later(State::Transfer)) };
        let mut pieces = read.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        let ShardFile::Local(local) = &**file else {
            let len = (read.end - read.start) as usize;
            return Ok(Start::Now(Transfer::fetch(block, (file, read.start), len)));
        };
        // Either all pieces of a block are mapped, or none is.
        if let Some(Piece { destination: PieceDestination::Mapped(map), .. }) = pieces.first() {
            let part = Part::Mapped(Arc::clone(map), read.start as usize..read.end as usize);
            let (buf, path) = (Buf::new(None, vec![part]), (IoPath::Buffered, Reason::Mapped));
            return Ok(Start::Now(Transfer::new(block, false, (file, read.start), buf, path)));
        }
        // If direct I/O and the page cache are both possible, cached bytes come from the page cache.
        let hot = !self.from_device
            && self.io == Io::Auto
            && file.is_direct()
            && local.is_cached(read.start, read.end, shard.bytes);
        let direct = file.is_direct() && !hot;
        if self.ahead {
            self.read_ahead(block, local);
        }
        if self.from_device && !direct {
            // The kernel does not drop a page of which only a part is in the range.
            local.forget(geometry::down(read.start, PAGE), read.end.next_multiple_of(PAGE));
        }
        let (start, end) = if direct {
            (geometry::down(read.start, PAGE), read.end.next_multiple_of(PAGE))
        } else {
            (read.start, read.end)
        };
        let (parts, staged, reason) = self.lay_out(&mut pieces, (start, end), direct);
        let straight = parts.iter().any(|part| matches!(part, Part::Region(_)));
        let path = match (direct, hot) {
            (true, _) if straight => (IoPath::ZeroCopy, Reason::Possible),
            (true, _) => (IoPath::Staged, reason),
            (_, true) => (IoPath::Buffered, Reason::Cached),
            _ if self.direct => (IoPath::Buffered, Reason::Refused),
            _ if self.io == Io::Auto => (IoPath::Buffered, Reason::Shared),
            _ => (IoPath::Buffered, Reason::Asked),
        };
        let slab = if staged > 0 { Some(slab(staged)?) } else { None };
        // At the end of the file, fewer bytes arrive than were requested.
        let need = (end.min(shard.bytes) - start) as usize;
        let transfer = Transfer::new(block, false, (file, start), Buf::new(slab, parts), path);
        Ok(Start::Now(Transfer { need, ..transfer }))
    }

    fn finish(&self, transfer: &mut Transfer, moved: io::Result<()>, lane: &Lane<'_>) -> Result<Next> {
        let read = &self.plan.blocks[transfer.block];
        let shard = &self.checkpoint.body.shards[read.shard];
        let last = self.files.release(read.shard).is_some();
        let mut pieces = std::mem::take(&mut *read.pieces.lock().unwrap_or_else(PoisonError::into_inner));
        // If the file ends early, the bytes before its end have been read.
        let (end, reason) = match moved {
            Ok(()) => (u64::MAX, String::new()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                (transfer.offset + transfer.done as u64, "the file is too short to hold it".to_owned())
            }
            Err(error)
                if matches!(self.outcome, Outcome::Collect(_))
                    && !self.refuses(&error)
                    && self.checkpoint.is_damage(&error) =>
            {
                let missing = self.checkpoint.is_stored(); // in a store, no other error is damage
                (0, if missing { "the file is missing".to_owned() } else { error.to_string() })
            }
            Err(error) => {
                let path = self.checkpoint.path_of(&shard.file);
                return Err(Error::transfer("read", &path, error, self.io == Io::Direct));
            }
        };
        // Accessed only once, because each access asks the kernel for the id of this process.
        let (parts, slab) = (transfer.buf.parts(), transfer.buf.slab());
        // The bytes before the piece that are not in the staging buffer.
        let (mut past, mut due) = (0, Vec::new());
        for piece in &mut pieces {
            let at = (piece.offset - transfer.offset) as usize - past;
            if let PieceDestination::Edges { part, .. } = piece.destination {
                past += parts[part].len();
            }
            if piece.offset + piece.len as u64 > end {
                self.damaged(shard, piece, reason.clone())?;
            } else {
                transfer.copied += self.deliver(shard, piece, (parts, slab, at), &mut due)?;
            }
        }
        let bytes = pieces.iter().map(|piece| piece.len as u64).sum();
        lane.moved(bytes);
        lane.operation().checked(bytes, last);
        if due.is_empty() {
            return Ok(Next::Done);
        }
        *read.due.lock().unwrap_or_else(PoisonError::into_inner) = due;
        Ok(Next::Hold)
    }

    fn hand_over(&self, held: &[Transfer]) -> Result<u64> {
        let due = |transfer: &Transfer| {
            let due = &self.plan.blocks[transfer.block].due;
            std::mem::take(&mut *due.lock().unwrap_or_else(PoisonError::into_inner))
        };
        let due: Vec<_> = held
            .iter()
            .flat_map(|transfer| due(transfer).into_iter().map(move |due| (transfer, due)))
            .collect();
        // Rows that are not contiguous are packed first.
        let packed: Vec<_> = due.iter().map(|(transfer, due)| due.pack(transfer.buf.slab())).collect();
        let mut all = Vec::with_capacity(due.len());
        for ((transfer, due), packed) in due.iter().zip(&packed) {
            let bytes = packed.as_deref().unwrap_or_else(|| &transfer.buf.slab()[due.at.clone()]);
            let mut at = 0;
            for (first, len) in due.runs() {
                all.push((&due.to, first, &bytes[at..at + len]));
                at += len;
            }
        }
        content::hand_over(all)?;
        Ok(packed.iter().flatten().map(|bytes| bytes.len() as u64).sum())
    }
}
