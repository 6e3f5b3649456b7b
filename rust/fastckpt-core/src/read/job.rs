//! What a block of a read consists of, and where its pieces go.

use std::io;
use std::os::fd::AsFd;
use std::sync::{Mutex, PoisonError};

use super::{Checkpoint, Request};
use crate::align::{self, PAGE};
use crate::checksum::{self, Side};
use crate::error::{Error, Result};
use crate::io::files::OpenFiles;
use crate::manifest::ShardEntry;
use crate::report::Damage;
use crate::source::{Destination, Drain};
use crate::sys::buf::{Buf, Region, Slab};
use crate::sys::file::DataFile;
use crate::telemetry::Lane;
use crate::worker::{Job, Transfer};

/// What happens to damage.
pub(super) enum Outcome {
    /// The first ends the operation.
    Raise,
    /// All is noted.
    Collect(Mutex<Vec<Damage>>),
}

/// A part of a request that lies in one block.
struct Piece {
    tensor: usize,
    /// First byte, counted in the file.
    offset: u64,
    /// First byte, counted in the tensor.
    start: u64,
    len: usize,
    /// What the checksum must be, where the piece is a whole extent and is to be verified.
    crc: Option<u64>,
    destination: PieceDestination,
}

enum PieceDestination {
    Memory(Region),
    Push(Drain),
    Nowhere,
}

/// One read: what is wanted of one block, and the pieces it consists of, until a worker takes them.
struct ReadBlock {
    shard: usize,
    start: u64,
    end: u64,
    pieces: Mutex<Vec<Piece>>,
}

/// Reads blocks and hands their pieces to where they go.
pub(super) struct ReadJob<'a> {
    checkpoint: &'a Checkpoint,
    direct: bool,
    pub(super) outcome: Outcome,
    files: OpenFiles,
    blocks: Vec<ReadBlock>,
    pub(super) shards: Vec<usize>,
    pub(super) tensors: usize,
    pub(super) bytes: u64,
}

impl<'a> ReadJob<'a> {
    pub(super) fn new(
        checkpoint: &'a Checkpoint,
        mut requests: Vec<Request>,
        verify: bool,
        direct: bool,
        outcome: Outcome,
    ) -> Result<Self> {
        let body = &checkpoint.body;
        let size = body.block_size;
        for request in &requests {
            let tensor = body.tensors.get(request.tensor);
            let fits = tensor.is_some_and(|t| request.start <= request.end && request.end <= t.bytes());
            let room = match &request.destination {
                Destination::Memory(region) => region.len() as u64 == request.end - request.start,
                Destination::Push(_) | Destination::Nowhere => true,
            };
            if !fits || !room {
                return Err(Error::Invalid(
                    "a read request does not fit its tensor or its memory".to_owned(),
                ));
            }
        }
        requests.sort_by_key(|r| (body.tensors[r.tensor].shard, body.tensors[r.tensor].offset, r.start));
        let (mut bytes, mut tensors) = (0, 0);
        let mut blocks: Vec<ReadBlock> = Vec::new();
        let mut last = None;
        for Request { tensor, start, end, mut destination } in requests {
            tensors += usize::from(last.replace(tensor) != Some(tensor));
            let entry = &body.tensors[tensor];
            bytes += end - start;
            let mut at = start;
            while at < end {
                let offset = entry.offset + at;
                let block = align::down(offset, size);
                let stop = end.min(at + (block + size - offset));
                let whole = at == 0 || offset == block;
                let whole = whole && (stop == entry.bytes() || entry.offset + stop == block + size);
                let len = (stop - at) as usize;
                let piece = Piece {
                    tensor,
                    offset,
                    start: at,
                    len,
                    crc: (verify && whole)
                        .then(|| entry.extent_crc(block / size - entry.offset / size))
                        .flatten(),
                    destination: match &mut destination {
                        Destination::Memory(region) => PieceDestination::Memory(region.split_off_front(len)),
                        Destination::Push(drain) => PieceDestination::Push(Drain::clone(drain)),
                        Destination::Nowhere => PieceDestination::Nowhere,
                    },
                };
                match blocks.last_mut() {
                    Some(b) if b.shard == entry.shard && align::down(b.start, size) == block => {
                        b.end = b.end.max(offset + len as u64);
                        b.pieces.get_mut().unwrap_or_else(PoisonError::into_inner).push(piece);
                    }
                    _ => blocks.push(ReadBlock {
                        shard: entry.shard,
                        start: offset,
                        end: offset + len as u64,
                        pieces: Mutex::new(vec![piece]),
                    }),
                }
                at = stop;
            }
        }
        let mut counts = vec![0; body.shards.len()];
        for block in &blocks {
            counts[block.shard] += 1;
        }
        let shards = (0..counts.len()).filter(|&shard| counts[shard] > 0).collect();
        Ok(Self {
            checkpoint,
            direct,
            outcome,
            files: OpenFiles::new(counts),
            blocks,
            shards,
            tensors,
            bytes,
        })
    }

    /// Notes damage to one piece, or raises it.
    fn damaged(&self, shard: &ShardEntry, piece: &Piece, reason: String) -> Result<()> {
        let damage = Damage {
            file: shard.file.clone(),
            offset: piece.offset,
            len: piece.len as u64,
            tensor: Some(self.checkpoint.body.tensors[piece.tensor].name.clone()),
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

    /// Gives the bytes of one piece to its destination and compares what arrived with the checksum.
    fn deliver(&self, shard: &ShardEntry, piece: &mut Piece, bytes: &[u8]) -> Result<()> {
        let check = piece.crc.is_some();
        let found = match &mut piece.destination {
            PieceDestination::Memory(region) if check => checksum::copy(region, bytes, Side::Copy),
            PieceDestination::Memory(region) => {
                region.copy_from_slice(bytes);
                0
            }
            PieceDestination::Push(_) | PieceDestination::Nowhere if check => checksum::of(bytes),
            PieceDestination::Push(_) | PieceDestination::Nowhere => 0,
        };
        self.compare(shard, piece, found)?;
        if let PieceDestination::Push(drain) = &piece.destination {
            drain(piece.start, bytes).map_err(Error::Callback)?;
        }
        Ok(())
    }

    fn compare(&self, shard: &ShardEntry, piece: &Piece, found: u64) -> Result<()> {
        match piece.crc {
            Some(wanted) if wanted != found => self.damaged(
                shard,
                piece,
                format!("checksum is {}, written was {}", checksum::to_hex(found), checksum::to_hex(wanted)),
            ),
            _ => Ok(()),
        }
    }
}

/// The memory that a block can be read straight into: it is one piece, and everything is aligned.
fn straight(pieces: &mut [Piece]) -> Option<&mut Region> {
    let [Piece { destination: PieceDestination::Memory(region), offset, len, .. }] = pieces else {
        return None;
    };
    let aligned = [*offset, *len as u64, region.address() as u64].iter().all(|&value| align::is(value, PAGE));
    aligned.then_some(region)
}

impl Job for ReadJob<'_> {
    const WRITE: bool = false;

    fn blocks(&self) -> usize {
        self.blocks.len()
    }

    fn files(&self) -> usize {
        self.shards.len()
    }

    fn total(&self) -> u64 {
        self.bytes
    }

    fn file(&self, block: usize) -> usize {
        self.blocks[block].shard
    }

    fn largest(&self) -> usize {
        let spans = self.blocks.iter().map(|read| align::up(read.end, PAGE) - align::down(read.start, PAGE));
        spans.max().unwrap_or(0) as usize
    }

    fn start(&self, block: usize, slab: &mut dyn FnMut(usize) -> Result<Slab>) -> Result<Transfer> {
        let read = &self.blocks[block];
        let shard = &self.checkpoint.body.shards[read.shard];
        let file = self.files.acquire(read.shard, || match &self.outcome {
            Outcome::Raise => self.checkpoint.open_shard(read.shard, self.direct),
            // The wrong length was noted; what there is can still be read.
            Outcome::Collect(_) => {
                let path = self.checkpoint.path_of(&shard.file);
                DataFile::open_read(self.checkpoint.directory.as_fd(), &shard.file, self.direct)
                    .map(|(file, _)| file)
                    .map_err(|error| self.checkpoint.unreadable(&path, error))
            }
        })?;
        let mut pieces = read.pieces.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(region) = straight(&mut pieces).filter(|_| file.is_direct()) {
            let region = region.take();
            region.populate();
            let len = region.len();
            return Ok(Transfer {
                file,
                offset: read.start,
                range: 0..len,
                need: len,
                moved: 0,
                buf: Buf::Region(region),
            });
        }
        let (start, end) = if file.is_direct() {
            (align::down(read.start, PAGE), align::up(read.end, PAGE))
        } else {
            (read.start, read.end)
        };
        // At the end of the file fewer bytes come than are asked for.
        let need = (end.min(shard.bytes) - start) as usize;
        Ok(Transfer {
            file,
            offset: start,
            range: 0..(end - start) as usize,
            need,
            moved: 0,
            buf: Buf::Slab(slab((end - start) as usize)?),
        })
    }

    fn finish(
        &self,
        block: usize,
        transfer: &mut Transfer,
        moved: io::Result<()>,
        lane: &Lane<'_>,
    ) -> Result<()> {
        let read = &self.blocks[block];
        let shard = &self.checkpoint.body.shards[read.shard];
        let last = self.files.release(read.shard).is_some();
        let mut pieces = std::mem::take(&mut *read.pieces.lock().unwrap_or_else(PoisonError::into_inner));
        // Where the file ends early, what lies before its end did arrive.
        let (end, reason) = match moved {
            Ok(()) => (u64::MAX, String::new()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                (transfer.offset + transfer.moved as u64, "the file is too short to hold it".to_owned())
            }
            Err(error) if matches!(self.outcome, Outcome::Collect(_)) => (0, error.to_string()),
            Err(error) => return Err(Error::io("read", &self.checkpoint.path_of(&shard.file))(error)),
        };
        for piece in &mut pieces {
            if piece.offset + piece.len as u64 > end {
                self.damaged(shard, piece, reason.clone())?;
            } else if let Buf::Region(region) = &transfer.buf {
                // It went straight to where it belongs.
                let found = if piece.crc.is_some() { checksum::of(region) } else { 0 };
                self.compare(shard, piece, found)?;
            } else {
                let at = (piece.offset - transfer.offset) as usize;
                let bytes = &transfer.buf[at..at + piece.len];
                self.deliver(shard, piece, bytes)?;
            }
        }
        let bytes = pieces.iter().map(|piece| piece.len as u64).sum();
        lane.moved(bytes);
        lane.operation().checked(bytes, last);
        Ok(())
    }
}
