//! Reading: a checkpoint is opened, byte ranges of its tensors are read, or all of it is verified.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use crate::align::{self, PAGE};
use crate::checksum::{self, Side};
use crate::commit;
use crate::error::{Error, Result};
use crate::io::files::OpenFiles;
use crate::manifest::{self, Body, ShardEntry};
use crate::options::Options;
use crate::report::{Damage, Report};
use crate::source::{Destination, Drain};
use crate::sys::buf::{Buf, Region, Slab};
use crate::sys::file::{self, DataFile};
use crate::telemetry::{self, Kind, Lane, Operation};
use crate::worker::{self, Crew, Job, Tick, Transfer};

/// How often a checkpoint is opened again that is replaced meanwhile.
const TURNS: usize = 100;
/// Reads in pieces of this many bytes where no worker is needed (headers).
const SMALL_READ: usize = 1 << 20;

/// An open checkpoint: its manifest, read and checked.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    directory: OwnedFd,
    body: Body,
}

/// Bytes of one tensor that are wanted.
#[derive(Debug)]
pub struct Request {
    /// Index of the tensor.
    pub tensor: usize,
    /// First byte, counted in the tensor.
    pub start: u64,
    /// The byte after the last.
    pub end: u64,
    /// Where they go.
    pub destination: Destination,
}

/// What happens to damage.
enum Outcome {
    /// The first ends the operation.
    Raise,
    /// All is noted.
    Collect(Mutex<Vec<Damage>>),
}

impl Checkpoint {
    /// Opens the checkpoint at `path`.
    pub fn open(path: &Path) -> Result<Self> {
        for _ in 0..TURNS {
            if let Some(checkpoint) = Self::open_once(path)? {
                return Ok(checkpoint);
            }
        }
        Err(Error::corrupt(path, "it is being replaced faster than it can be opened"))
    }

    /// Nothing if the directory was replaced between its opening and that of the manifest.
    fn open_once(path: &Path) -> Result<Option<Self>> {
        let directory = commit::open_checkpoint(path)?;
        let manifest = path.join(manifest::FILE);
        let (fd, len) = match file::open_regular(directory.as_fd(), manifest::FILE) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if has_other_name(&directory, path) {
                    return Ok(None);
                }
                let what = format!("it holds no `{}`, so it is no checkpoint", manifest::FILE);
                return Err(Error::corrupt(path, what));
            }
            other => other.map_err(|error| unreadable(&manifest, error))?,
        };
        if len > manifest::MAX_BYTES {
            let what = format!("{len} bytes are more than the {} allowed", manifest::MAX_BYTES);
            return Err(Error::corrupt(&manifest, what));
        }
        let mut bytes = vec![0; len as usize];
        let read = file::read_at(fd.as_fd(), &mut bytes, 0).map_err(Error::io("read", &manifest))?;
        if read < bytes.len() {
            return Err(Error::corrupt(&manifest, "it became shorter while it was read"));
        }
        let body = manifest::decode(bytes, &manifest)?;
        Ok(Some(Self { path: path.to_path_buf(), directory, body }))
    }

    /// The manifest.
    #[must_use]
    pub fn body(&self) -> &Body {
        &self.body
    }

    /// Reads `requests`. With `verify`, every extent that is read whole is compared with its checksum, and so is the header of each
    /// shard touched; the first difference is an error, by which time other destinations may have been filled.
    pub fn read(
        &self,
        requests: Vec<Request>,
        verify: bool,
        options: &Options,
        tick: Tick<'_>,
    ) -> Result<Report> {
        let operation = Operation::begin(Kind::Load, &self.path, options.step);
        let outcome = self.load(requests, verify, options, &operation, tick);
        operation.end(telemetry::outcome(&outcome));
        outcome
    }

    fn load(
        &self,
        requests: Vec<Request>,
        verify: bool,
        options: &Options,
        operation: &Operation,
        tick: Tick<'_>,
    ) -> Result<Report> {
        let begin = Instant::now();
        let mut crew = Crew::choose(options);
        let job = ReadJob::new(self, requests, verify, crew.direct(), Outcome::Raise)?;
        if verify {
            for &shard in &job.shards {
                if let Some(damage) = self.check_header(shard)? {
                    return Err(self.raised(damage));
                }
            }
        }
        self.run(&job, &mut crew, options, begin, operation, tick)
    }

    /// Compares every byte with its checksum and returns all that differs.
    pub fn verify(&self, options: &Options, tick: Tick<'_>) -> Result<(Report, Vec<Damage>)> {
        let operation = Operation::begin(Kind::Verify, &self.path, options.step);
        let outcome = self.compare_all(options, &operation, tick);
        operation.end(telemetry::outcome(&outcome));
        outcome
    }

    fn compare_all(
        &self,
        options: &Options,
        operation: &Operation,
        tick: Tick<'_>,
    ) -> Result<(Report, Vec<Damage>)> {
        let begin = Instant::now();
        let mut crew = Crew::choose(options);
        let mut damage = Vec::new();
        let mut readable = vec![true; self.body.shards.len()];
        for (index, shard) in self.body.shards.iter().enumerate() {
            match self.open_shard(index, false) {
                Ok(_) => damage.extend(self.check_header(index)?),
                Err(Error::Corrupt { what, .. }) => {
                    let (found, missing) = self.shard_length(shard);
                    readable[index] = !missing;
                    let offset = found.min(shard.bytes);
                    let len = found.max(shard.bytes) - offset;
                    if missing {
                        damage.extend(self.lost(index, &what));
                    }
                    damage.push(Damage { file: shard.file.clone(), offset, len, tensor: None, reason: what });
                    if found >= shard.data_offset {
                        damage.extend(self.check_header(index)?);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        let requests = self.body.tensors.iter().enumerate().filter(|(_, tensor)| readable[tensor.shard]);
        let requests = requests.map(|(index, tensor)| Request {
            tensor: index,
            start: 0,
            end: tensor.bytes(),
            destination: Destination::Nowhere,
        });
        let job =
            ReadJob::new(self, requests.collect(), true, crew.direct(), Outcome::Collect(Mutex::default()))?;
        let report = self.run(&job, &mut crew, options, begin, operation, tick)?;
        if let Outcome::Collect(found) = job.outcome {
            damage.append(&mut found.into_inner().unwrap_or_else(PoisonError::into_inner));
        }
        damage.extend(self.check_sums());
        damage.sort();
        damage.dedup();
        Ok((report, damage))
    }

    fn run(
        &self,
        job: &ReadJob<'_>,
        crew: &mut Crew,
        options: &Options,
        begin: Instant,
        operation: &Operation,
        tick: Tick<'_>,
    ) -> Result<Report> {
        let planned = begin.elapsed().as_secs_f64();
        let blocks = worker::run(job, crew, options, self.body.block_size, operation, tick)?;
        let seconds = begin.elapsed().as_secs_f64();
        Ok(Report {
            bytes: job.bytes,
            phases: vec![("plan", planned), ("read", seconds - planned)],
            seconds,
            threads: crew.threads,
            engine: crew.engine,
            fallback: crew.fallback.clone(),
            blocks,
            shards: job.shards.len(),
            tensors: job.tensors,
        })
    }

    /// The path of a file inside, for messages.
    fn path_of(&self, file: &str) -> PathBuf {
        self.path.join(file)
    }

    /// Opens a shard and looks at its length.
    fn open_shard(&self, index: usize, direct: bool) -> Result<DataFile> {
        let shard = &self.body.shards[index];
        let path = self.path_of(&shard.file);
        match DataFile::open_read(self.directory.as_fd(), &shard.file, direct) {
            Ok((file, len)) if len == shard.bytes => Ok(file),
            Ok((_, len)) => {
                Err(Error::corrupt(&path, format!("it has {len} bytes, written were {}", shard.bytes)))
            }
            Err(error) => Err(self.unreadable(&path, error)),
        }
    }

    /// Why a shard cannot be opened.
    fn unreadable(&self, path: &Path, error: io::Error) -> Error {
        if error.kind() == io::ErrorKind::NotFound && has_other_name(&self.directory, &self.path) {
            return Error::io(
                "go on reading a checkpoint that was replaced meanwhile (open it again):",
                path,
            )(error);
        }
        unreadable(path, error)
    }

    /// Every tensor of a shard that cannot be read at all.
    fn lost(&self, index: usize, reason: &str) -> impl Iterator<Item = Damage> {
        let file = &self.body.shards[index].file;
        let tensors =
            self.body.tensors.iter().filter(move |tensor| tensor.shard == index && tensor.bytes() > 0);
        tensors.map(move |tensor| Damage {
            file: file.clone(),
            offset: tensor.offset,
            len: tensor.bytes(),
            tensor: Some(tensor.name.clone()),
            reason: reason.to_owned(),
        })
    }

    /// The length a shard has, and whether there is none at all.
    fn shard_length(&self, shard: &ShardEntry) -> (u64, bool) {
        file::open_regular(self.directory.as_fd(), &shard.file).map_or((0, true), |(_, len)| (len, false))
    }

    /// Compares the header of a shard with its checksum.
    fn check_header(&self, index: usize) -> Result<Option<Damage>> {
        let shard = &self.body.shards[index];
        let path = self.path_of(&shard.file);
        let (fd, _) = file::open_regular(self.directory.as_fd(), &shard.file)
            .map_err(|error| self.unreadable(&path, error))?;
        let mut crc = checksum::of(&[]);
        let mut at = 0;
        let mut length_field = [0; 8];
        let mut piece = vec![0; SMALL_READ.min(shard.data_offset as usize)];
        while at < shard.data_offset {
            let want = piece.len().min((shard.data_offset - at) as usize);
            let got = file::read_at(fd.as_fd(), &mut piece[..want], at).map_err(Error::io("read", &path))?;
            if got == 0 {
                break;
            }
            for (field, byte) in length_field.iter_mut().skip(at as usize).zip(&piece[..got]) {
                *field = *byte;
            }
            crc = checksum::combine(crc, checksum::of(&piece[..got]), got as u64);
            at += got as u64;
        }
        // A forged manifest may vouch for a header that other readers would take for another length.
        let begin = u64::from_le_bytes(length_field).checked_add(8);
        if at == shard.data_offset && begin != Some(at) {
            let reason = format!("header: its length field puts the data elsewhere than at byte {at}");
            return Ok(Some(Damage { file: shard.file.clone(), offset: 0, len: 8, tensor: None, reason }));
        }
        let sound = at == shard.data_offset && checksum::to_hex(crc) == shard.header_crc;
        Ok((!sound).then(|| Damage {
            file: shard.file.clone(),
            offset: 0,
            len: shard.data_offset,
            tensor: None,
            reason: format!(
                "header: checksum is {}, written was {}",
                checksum::to_hex(crc),
                shard.header_crc
            ),
        }))
    }

    /// Compares the checksum of each whole shard, which copies elsewhere are checked against, with those of its parts.
    fn check_sums(&self) -> Vec<Damage> {
        let size = self.body.block_size;
        let mut sums: Vec<Option<u64>> =
            self.body.shards.iter().map(|shard| checksum::from_hex(shard.header_crc.as_bytes())).collect();
        let mut order: Vec<_> = self.body.tensors.iter().collect();
        order.sort_by_key(|tensor| (tensor.shard, tensor.offset));
        for tensor in order {
            let (mut at, end) = (tensor.offset, tensor.offset + tensor.bytes());
            let mut index = 0;
            while at < end {
                let stop = end.min(align::down(at, size) + size);
                let sum = &mut sums[tensor.shard];
                *sum = sum.zip(tensor.extent_crc(index)).map(|(a, b)| checksum::combine(a, b, stop - at));
                (at, index) = (stop, index + 1);
            }
        }
        let wrong = self
            .body
            .shards
            .iter()
            .zip(sums)
            .filter(|(shard, sum)| sum.map(checksum::to_hex).as_deref() != Some(shard.crc.as_str()));
        let damage = |(shard, _): (&ShardEntry, _)| Damage {
            file: shard.file.clone(),
            offset: 0,
            len: shard.bytes,
            tensor: None,
            reason: "the manifest's checksum of the whole shard is not that of its parts".to_owned(),
        };
        wrong.map(damage).collect()
    }

    fn raised(&self, damage: Damage) -> Error {
        let Damage { file, offset, len, tensor, reason } = damage;
        let tensor = tensor.map_or_else(String::new, |name| format!(" (tensor `{name}`)"));
        Error::corrupt(&self.path_of(&file), format!("bytes {offset} to {}{tensor}: {reason}", offset + len))
    }
}

/// Whether the directory that is held open no longer is the one of that name.
fn has_other_name(directory: &OwnedFd, path: &Path) -> bool {
    match (rustix::fs::fstat(directory), rustix::fs::stat(path)) {
        (Ok(held), Ok(named)) => (held.st_dev, held.st_ino) != (named.st_dev, named.st_ino),
        _ => true,
    }
}

/// Why a file of a checkpoint cannot be opened: damage where the checkpoint itself is at fault.
fn unreadable(path: &Path, error: io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ENOENT) => Error::corrupt(path, "the file is missing"),
        Some(libc::ELOOP) => Error::corrupt(path, "the file is a symbolic link, which is not followed"),
        Some(libc::ENXIO | libc::ENODEV) => Error::corrupt(path, "not a regular file"),
        None if error.kind() == io::ErrorKind::InvalidInput => Error::corrupt(path, error.to_string()),
        _ => Error::io("open", path)(error),
    }
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
struct ReadJob<'a> {
    checkpoint: &'a Checkpoint,
    direct: bool,
    outcome: Outcome,
    files: OpenFiles,
    blocks: Vec<ReadBlock>,
    shards: Vec<usize>,
    tensors: usize,
    bytes: u64,
}

impl<'a> ReadJob<'a> {
    fn new(
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
