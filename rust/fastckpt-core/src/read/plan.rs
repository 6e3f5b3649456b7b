//! Plans which bytes of which shards are read for requests: blocks, and the pieces of blocks. Moves nothing.

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::engine::content::{Destination, Push, Take};
use crate::error::{Error, Result};
use crate::format::geometry::{self, STRAIGHT};
use crate::format::manifest::{Body, TensorEntry};
use crate::sys::map::FileMap;
use crate::sys::memory::Region;
use crate::sys::strided::{Rows, Strided};

/// Wanted ranges closer than this many bytes are read as one: a separate operation would cost about as much.
const MERGE: u64 = 256 << 10;

/// A tensor, or a box of it, to read.
#[derive(Debug)]
pub struct Request {
    /// Index of the tensor.
    pub tensor: usize,
    /// The box; `None` for the whole tensor. A [`Destination::Strided`] has its own box.
    pub rows: Option<Arc<Rows>>,
    /// Where the bytes go.
    pub destination: Destination,
}

impl Request {
    fn rows(&self) -> Option<&Arc<Rows>> {
        match &self.destination {
            Destination::Strided(strided) => Some(strided.rows()),
            _ => self.rows.as_ref(),
        }
    }

    /// The number of wanted bytes of the tensor.
    pub(super) fn bytes(&self, body: &Body) -> u64 {
        let whole = || body.tensors.get(self.tensor).map_or(0, TensorEntry::bytes);
        self.rows().map_or_else(whole, |rows| rows.bytes())
    }

    /// Whether the tensor has the wanted bytes and the destination has room for them.
    fn fits(&self, body: &Body) -> bool {
        let Some(tensor) = body.tensors.get(self.tensor) else { return false };
        let inside = self.rows().is_none_or(|rows| rows.range().end <= tensor.bytes());
        inside
            && match &self.destination {
                Destination::Memory(region) => self.rows.is_none() && region.len() as u64 == tensor.bytes(),
                Destination::Mapped(map) => tensor.offset + tensor.bytes() <= map.len() as u64,
                Destination::Strided(_) | Destination::Push(_) | Destination::Nowhere => true,
                Destination::Take(_) => self.rows.is_none(),
                Destination::Rows(..) => false,
            }
    }
}

/// A range of a tensor to read.
#[derive(Debug)]
pub struct Wanted {
    /// Index of the tensor.
    pub tensor: usize,
    /// The range of bytes.
    pub range: Range<u64>,
    /// Where the bytes go. The destination has room for exactly these bytes, or takes a part of them.
    pub destination: Destination,
    /// Whether other ranks read the rest of its extents. If so, only the range is read, and the checksum of its part of
    /// each extent is computed instead of compared.
    pub apart: bool,
}

impl Wanted {
    /// Whether the tensor has these bytes and the destination has room for them.
    fn fits(&self, body: &Body) -> bool {
        let Range { start, end } = self.range;
        let bytes = body.tensors.get(self.tensor).map_or(0, TensorEntry::bytes);
        start < end
            && end <= bytes
            && match &self.destination {
                Destination::Memory(region) => region.len() as u64 == end - start,
                Destination::Strided(_)
                | Destination::Push(_)
                | Destination::Rows(..)
                | Destination::Take(_) => true,
                Destination::Mapped(_) | Destination::Nowhere => false,
            }
    }
}

/// Bytes of a tensor that are in one block. To be verified, they must be a whole extent.
pub(super) struct Piece {
    pub(super) tensor: usize,
    /// First byte, counted in the file.
    pub(super) offset: u64,
    /// First byte, counted in the tensor.
    pub(super) start: u64,
    pub(super) len: usize,
    /// The expected checksum, if the piece must be verified.
    pub(super) crc: Option<u64>,
    /// Whether the piece is only a part of an extent, and its checksum must be computed.
    pub(super) sum: bool,
    pub(super) destination: PieceDestination,
}

/// A destination for some bytes of a piece.
pub(super) struct Share {
    /// First byte, counted in the tensor.
    pub(super) start: u64,
    pub(super) len: usize,
    pub(super) destination: PieceDestination,
}

pub(super) enum PieceDestination {
    Memory(Region),
    /// Memory whose middle, part `part` of the transfer, is filled without a copy. The bytes before and after it come
    /// from a staging buffer.
    Edges {
        before: Region,
        part: usize,
        after: Region,
    },
    Strided(Strided),
    /// All bytes of the piece, or only the bytes of rows, the first of which begins at this byte of an array.
    Push(Push, Option<(Arc<Rows>, u64)>),
    Take(Take),
    Mapped(Arc<FileMap>),
    Nowhere,
    /// Only a part of the piece is wanted, or parts of it go to different places. Each share has a plain destination.
    Shares(Vec<Share>),
}

/// One read: the wanted range of one block, and the pieces that make it up, until a worker takes them.
pub(super) struct ReadBlock {
    pub(super) shard: usize,
    pub(super) start: u64,
    pub(super) end: u64,
    pub(super) pieces: Mutex<Vec<Piece>>,
    /// Verified bytes for callbacks.
    pub(super) due: Mutex<Vec<Due>>,
}

/// Bytes in the staging buffer of a block that a callback takes.
pub(super) struct Due {
    pub(super) to: Push,
    /// The rows, as in [`PieceDestination::Push`].
    pub(super) rows: Option<(Arc<Rows>, u64)>,
    /// First byte, counted in the tensor.
    pub(super) start: u64,
    /// The place of the bytes in the staging buffer.
    pub(super) at: Range<usize>,
}

/// Everything to read.
#[derive(Default)]
pub(super) struct Plan {
    /// The blocks, in the order of shards and offsets.
    pub(super) blocks: Vec<ReadBlock>,
    /// The number of bytes that the requests want.
    pub(super) wanted: u64,
    /// The number of bytes of tensors that are read for the requests.
    pub(super) read: u64,
    pub(super) tensors: usize,
    /// Whether callbacks take any bytes.
    pub(super) calls: bool,
}

/// Plans the reading of `requests`. With `verify`, every extent that a request touches is read whole and compared with
/// its checksum.
pub(super) fn plan(body: &Body, mut requests: Vec<Request>, verify: bool) -> Result<Plan> {
    if !requests.iter().all(|request| request.fits(body)) {
        return Err(Error::Invalid("a read request does not fit its tensor or its memory".to_owned()));
    }
    let place = |tensor: usize| (body.tensors[tensor].shard(), body.tensors[tensor].offset, tensor);
    requests.sort_by_key(|request| place(request.tensor));
    let calls = requests.iter().any(|request| matches!(request.destination, Destination::Push(_)));
    let mut plan = Plan { calls, ..Plan::default() };
    let mut cut = Cut { body, verify, whole: verify, pieces: Vec::with_capacity(requests.len()) };
    let mut last = None;
    for request in requests {
        plan.tensors += usize::from(last.replace(request.tensor) != Some(request.tensor));
        plan.wanted += request.bytes(body);
        cut.request(request);
    }
    plan.add(body, cut.pieces, verify);
    Ok(plan)
}

/// Plans the reading of ranges, which may overlap. Every extent that they touch is read once, whole.
pub(super) fn plan_ranges(body: &Body, wanted: Vec<Wanted>, verify: bool) -> Result<Plan> {
    if !wanted.iter().all(|wanted| wanted.fits(body)) {
        return Err(Error::Invalid("a range to read does not fit its tensor or its memory".to_owned()));
    }
    let calls = |wanted: &Wanted| matches!(wanted.destination, Destination::Push(_) | Destination::Rows(..));
    let calls = wanted.iter().any(calls);
    let mut cut = Cut { body, verify, whole: true, pieces: Vec::with_capacity(wanted.len()) };
    for Wanted { tensor, range: Range { start, end }, destination, apart } in wanted {
        cut.whole = !apart;
        match destination {
            Destination::Memory(mut region) => {
                cut.range(tensor, start, end, |range| front(&mut region, &range));
            }
            Destination::Strided(mut strided) => {
                cut.range(tensor, start, end, |range| PieceDestination::Strided(strided.split_off(range)));
            }
            Destination::Push(to) => {
                cut.range(tensor, start, end, |_| PieceDestination::Push(to.clone(), None));
            }
            Destination::Rows(to, rows, base) => {
                let rows = Some((rows, base));
                cut.range(tensor, start, end, |_| PieceDestination::Push(to.clone(), rows.clone()));
            }
            Destination::Take(take) => {
                cut.range(tensor, start, end, |_| PieceDestination::Take(Take::clone(&take)));
            }
            Destination::Mapped(_) | Destination::Nowhere => {}
        }
    }
    let mut plan = Plan { calls, ..Plan::default() };
    plan.add(body, cut.pieces, true);
    plan.wanted = plan.read;
    let mut tensors: Vec<usize> =
        plan.blocks.iter_mut().flat_map(|block| pieces(block).iter().map(|piece| piece.tensor)).collect();
    tensors.sort_unstable();
    tensors.dedup();
    plan.tensors = tensors.len();
    Ok(plan)
}

impl Plan {
    /// The shards of the blocks, ascending.
    pub(super) fn shards(&self) -> Vec<usize> {
        let mut shards: Vec<usize> = self.blocks.iter().map(|block| block.shard).collect();
        shards.dedup();
        shards
    }

    /// Joins blocks of a shard into ranges of up to `most` bytes, with gaps of up to `gap` bytes.
    pub(super) fn join(&mut self, most: u64, gap: u64) {
        for mut block in std::mem::take(&mut self.blocks) {
            match self.blocks.last_mut() {
                Some(last)
                    if last.shard == block.shard
                        && block.end - last.start <= most
                        && block.start <= last.end + gap =>
                {
                    last.end = last.end.max(block.end);
                    pieces(last).append(pieces(&mut block));
                }
                _ => self.blocks.push(block),
            }
        }
    }

    /// Adds all pieces, joined to blocks. If they are `whole` extents, each extent is one piece for all destinations.
    fn add(&mut self, body: &Body, mut pieces: Vec<Piece>, whole: bool) {
        // Boxes of one tensor may be interleaved.
        pieces.sort_by_key(|piece| (body.tensors[piece.tensor].shard(), piece.offset));
        let mut pieces = pieces.into_iter().peekable();
        while let Some(mut piece) = pieces.next() {
            let same = |next: &Piece| whole && (next.tensor, next.offset) == (piece.tensor, piece.offset);
            let others: Vec<_> = std::iter::from_fn(|| pieces.next_if(same)).collect();
            for other in others {
                piece.share(other.start, other.len, other.destination);
            }
            self.read += piece.len as u64;
            add(&mut self.blocks, body, piece);
        }
    }
}

impl Piece {
    /// Adds a destination for bytes of this piece, from byte `start` of the tensor on.
    fn share(&mut self, start: u64, len: usize, destination: PieceDestination) {
        let mut shares = match std::mem::replace(&mut self.destination, PieceDestination::Nowhere) {
            PieceDestination::Shares(shares) => shares,
            PieceDestination::Nowhere => Vec::new(),
            alone => vec![Share { start: self.start, len: self.len, destination: alone }],
        };
        match destination {
            PieceDestination::Shares(more) => shares.extend(more),
            PieceDestination::Nowhere => {}
            one => shares.push(Share { start, len, destination: one }),
        }
        self.destination = PieceDestination::Shares(shares);
    }
}

fn pieces(block: &mut ReadBlock) -> &mut Vec<Piece> {
    block.pieces.get_mut().unwrap_or_else(PoisonError::into_inner)
}

/// Adds a piece to the last block if it belongs to that block and is close enough, or else to a new one.
fn add(blocks: &mut Vec<ReadBlock>, body: &Body, piece: Piece) {
    let (shard, start, end) =
        (body.tensors[piece.tensor].shard(), piece.offset, piece.offset + piece.len as u64);
    let block = |offset| geometry::down(offset, body.block_size);
    match blocks.last_mut() {
        Some(last)
            if last.shard == shard && block(last.start) == block(start) && start <= last.end + MERGE =>
        {
            last.end = last.end.max(end);
            pieces(last).push(piece);
        }
        _ => blocks.push(ReadBlock {
            shard,
            start,
            end,
            pieces: Mutex::new(vec![piece]),
            due: Mutex::default(),
        }),
    }
}

fn front(region: &mut Region, range: &Range<u64>) -> PieceDestination {
    PieceDestination::Memory(region.split_off_front((range.end - range.start) as usize))
}

/// Cuts requests into pieces.
struct Cut<'a> {
    body: &'a Body,
    verify: bool,
    /// Whether to read whole extents.
    whole: bool,
    pieces: Vec<Piece>,
}

impl Cut<'_> {
    fn request(&mut self, Request { tensor, rows, destination }: Request) {
        let bytes = self.body.tensors[tensor].bytes();
        match destination {
            Destination::Memory(mut region) => {
                self.range(tensor, 0, bytes, |range| front(&mut region, &range));
            }
            // Long rows, and a single row, are contiguous memory like any other.
            Destination::Strided(strided) if strided.rows().row() >= STRAIGHT.min(strided.rows().bytes()) => {
                for (start, mut region) in strided.regions() {
                    let end = start + region.len() as u64;
                    self.range(tensor, start, end, |range| front(&mut region, &range));
                }
            }
            Destination::Strided(mut strided) => {
                let rows = Arc::clone(strided.rows());
                self.rows(tensor, Some(&rows), |range| PieceDestination::Strided(strided.split_off(range)));
            }
            Destination::Push(to) => {
                let placed = rows.clone().map(|rows| (rows, 0));
                self.rows(tensor, rows.as_ref(), |_| PieceDestination::Push(to.clone(), placed.clone()));
            }
            Destination::Rows(..) => {} // it does not fit a request
            Destination::Take(take) => {
                self.rows(tensor, None, |_| PieceDestination::Take(Take::clone(&take)));
            }
            Destination::Mapped(map) => {
                self.rows(tensor, rows.as_ref(), |_| PieceDestination::Mapped(Arc::clone(&map)));
            }
            Destination::Nowhere => self.rows(tensor, rows.as_ref(), |_| PieceDestination::Nowhere),
        }
    }

    /// Cuts the range that is read for a box or the whole tensor. `to` makes the destination of a part of the range.
    fn rows(
        &mut self,
        tensor: usize,
        rows: Option<&Arc<Rows>>,
        mut to: impl FnMut(Range<u64>) -> PieceDestination,
    ) {
        let Some(rows) = rows else {
            let bytes = self.body.tensors[tensor].bytes();
            return self.range(tensor, 0, bytes, &mut to);
        };
        let joined = rows.joined(MERGE);
        for line in joined.lines(joined.range()) {
            for (start, _) in line.rows() {
                self.range(tensor, start, start + line.len, &mut to);
            }
        }
    }

    /// Cuts a range of a tensor at the edges of blocks. `to` makes the destination of each part.
    fn range(
        &mut self,
        tensor: usize,
        start: u64,
        end: u64,
        mut to: impl FnMut(Range<u64>) -> PieceDestination,
    ) {
        let entry = &self.body.tensors[tensor];
        for (extent, part) in geometry::extents(entry.placement(tensor), start..end, self.body.block_size) {
            let len = (part.end - part.start) as usize;
            let complete = self.whole || len as u64 == extent.len;
            let crc = (self.verify && complete).then(|| entry.extent_crc(extent.index)).flatten();
            let destination = to(part.clone());
            let piece = |start: u64, len, destination| Piece {
                tensor,
                offset: entry.offset + start,
                start,
                len,
                crc,
                sum: self.verify && !complete,
                destination,
            };
            if !self.whole || len as u64 == extent.len {
                self.pieces.push(piece(part.start, len, destination));
                continue;
            }
            let mut whole = piece(extent.start, extent.len as usize, PieceDestination::Nowhere);
            whole.share(part.start, len, destination);
            self.pieces.push(whole);
        }
    }
}
