//! Reading: a checkpoint is opened, and byte ranges of its tensors are read. `verify` reads all of it.

mod job;
mod map;
mod verify;

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use self::job::{Outcome, ReadJob};
pub use self::map::Maps;
use crate::commit;
use crate::engine::choice::Choice;
use crate::engine::content::Destination;
use crate::engine::job::Tick;
use crate::engine::options::{Io, Options};
use crate::engine::report::{Damage, Report};
use crate::engine::run::run;
use crate::error::{Error, Result};
use crate::format::checksum;
use crate::format::manifest::{self, Body};
use crate::sys::file::{self, DataFile};
use crate::telemetry::{self, Kind, Operation};

/// How long a checkpoint is opened again that is replaced again and again.
const REPLACED_WAIT: Duration = Duration::from_secs(30);
/// How long a file is looked for again where a directory's name may be believed longer than it is true: clients of network file systems keep
/// what they know of names, FUSE for a second unless told otherwise.
const DOUBT: Duration = Duration::from_secs(2);
/// How long to wait before looking again.
const PAUSE: Duration = Duration::from_millis(5);
/// Bytes at the manifest's beginning, its checksum among them, that tell it from any other.
const SEAL: usize = 64;
/// Reads in pieces of this many bytes where no worker is needed (headers).
const SMALL_READ: usize = 1 << 20;

/// An open checkpoint: its manifest, read and checked.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    directory: OwnedFd,
    body: Body,
    /// The first line of the manifest: it holds a checksum of the rest.
    seal: Vec<u8>,
    /// Whether the directory was found to have its name still, after a file was missing in it.
    certain: OnceLock<()>,
    /// Which shards' headers were found sound: reading tensors one by one need not read a header of megabytes each time.
    sound_headers: Vec<OnceLock<()>>,
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

impl Checkpoint {
    /// Opens the checkpoint at `path`.
    pub fn open(path: &Path) -> Result<Self> {
        let give_up = Instant::now() + REPLACED_WAIT;
        let mut doubt = None;
        loop {
            match Self::open_once(path) {
                Err(Error::Replaced { .. }) if Instant::now() < give_up => {}
                // Where a file system goes by names, a manifest may be missing, or another one, from one call to the next.
                Err(Error::Corrupt { .. })
                    if !is_local(path) && doubt.get_or_insert_with(Instant::now).elapsed() < DOUBT => {}
                other => return other,
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn open_once(path: &Path) -> Result<Self> {
        let replaced = || Error::Replaced { path: path.to_path_buf() };
        let directory = match commit::open_checkpoint(path) {
            Err(error) if error.errno() == Some(libc::ESTALE) => return Err(replaced()),
            other => other?,
        };
        let manifest = path.join(manifest::FILE);
        let (fd, len) = match file::open_regular(directory.as_fd(), manifest::FILE) {
            Err(error) if is_gone(&error) => {
                if is_stale(&error) || has_other_name(&directory, path) {
                    return Err(replaced());
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
        let read = file::read_at(fd.as_fd(), &mut bytes, 0).map_err(|error| {
            if is_gone(&error) { replaced() } else { Error::io("read", &manifest)(error) }
        })?;
        if read < bytes.len() {
            return Err(Error::corrupt(&manifest, "it became shorter while it was read"));
        }
        let seal = bytes[..read.min(SEAL)].to_vec();
        let body = manifest::decode(bytes, &manifest)?;
        let sound_headers = body.shards.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { path: path.to_path_buf(), directory, body, seal, certain: OnceLock::new(), sound_headers })
    }

    /// Its path, as it was opened.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Its directory.
    pub(crate) fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
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
        let operation = Operation::begin(Kind::Load, &self.path, options.step, &options.environment);
        let outcome =
            self.load(requests, verify, options, &operation, tick).map_err(|error| self.settle(error));
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
        let wanted = requests.iter().fold(0, |sum: u64, r| sum.saturating_add(r.end.saturating_sub(r.start)));
        let shared = options.io == Io::Auto && options.ranks().share(&self.path);
        let choice = if shared {
            // Past it, each rank would read all from the storage. Whoever comes first to a page reads it, the others wait for it.
            Choice::new(&Options { io: Io::Buffered, ..options.clone() }, wanted)
        } else {
            Choice::new(options, wanted)
        };
        let job = ReadJob::new(self, requests, verify, (choice.direct(), options), Outcome::Raise)?;
        if verify {
            self.check_headers(&job.shards)?;
        }
        self.run(&job, &choice, options, begin, operation, tick)
    }

    /// Compares the headers of `shards` with their checksums, those that were not yet.
    fn check_headers(&self, shards: &[usize]) -> Result<()> {
        for &shard in shards.iter().filter(|&&shard| self.sound_headers[shard].get().is_none()) {
            if let Some(damage) = self.check_header(shard)? {
                return Err(self.raised(damage));
            }
            let _ = self.sound_headers[shard].set(());
        }
        Ok(())
    }

    fn run(
        &self,
        job: &ReadJob<'_>,
        choice: &Choice,
        options: &Options,
        begin: Instant,
        operation: &Operation,
        tick: Tick<'_>,
    ) -> Result<Report> {
        let planned = begin.elapsed().as_secs_f64();
        let ran = run(job, choice, options, self.body.block_size, operation, tick)?;
        let seconds = begin.elapsed().as_secs_f64();
        Ok(Report {
            bytes: job.bytes,
            phases: vec![("plan", planned), ("read", seconds - planned)],
            seconds,
            ran,
            warnings: Vec::new(),
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
            Ok((file, len)) if len == shard.bytes || fresh_length(&file) == Some(shard.bytes) => Ok(file),
            Ok((_, len)) => {
                Err(Error::corrupt(&path, format!("it has {len} bytes, written were {}", shard.bytes)))
            }
            Err(error) => Err(self.unreadable(&path, error)),
        }
    }

    /// Why a shard cannot be opened.
    fn unreadable(&self, path: &Path, error: io::Error) -> Error {
        if is_gone(&error) && self.is_replaced(&error) {
            return Error::Replaced { path: self.path.clone() };
        }
        unreadable(path, error)
    }

    fn is_replaced(&self, error: &io::Error) -> bool {
        is_replaced(&self.directory, &self.path, &self.seal, error, &self.certain)
    }

    /// What `error`, of an operation on this checkpoint, means: on network file systems the files of a directory that another machine
    /// removed end in an error of their own, in a mapping in that of a disk that fails.
    fn settle(&self, error: Error) -> Error {
        let replaced = match &error {
            Error::Io { source, .. } => {
                matches!(source.raw_os_error(), Some(libc::ESTALE | libc::EIO)) && self.is_replaced(source)
            }
            Error::Corrupt { .. } => self.is_other(),
            _ => false,
        };
        if replaced { Error::Replaced { path: self.path.clone() } } else { error }
    }

    /// Whether damage is none because the files are another checkpoint's. Where a file system goes by names (FUSE), an open directory
    /// is what another machine has put in its place.
    fn is_other(&self) -> bool {
        commit::reach(self.directory.as_fd()) != commit::Reach::Machine
            && self.is_replaced(&io::Error::from_raw_os_error(libc::ENOENT))
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
            crc = checksum::append(crc, &piece[..got]);
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

    fn raised(&self, damage: Damage) -> Error {
        let Damage { file, offset, len, tensor, reason } = damage;
        let tensor = tensor.map_or_else(String::new, |name| format!(" (tensor `{name}`)"));
        Error::corrupt(&self.path_of(&file), format!("bytes {offset} to {}{tensor}: {reason}", offset + len))
    }
}

/// Whether `error` says that a file, or its directory, was removed.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESTALE))
}

/// The length of a file as the file system's server has it: what a client knows may be that of a file of the same name before.
fn fresh_length(file: &DataFile) -> Option<u64> {
    commit::refresh(file.fd(false));
    u64::try_from(rustix::fs::fstat(file.fd(false)).ok()?.st_size).ok()
}

fn is_local(path: &Path) -> bool {
    file::open_directory(path)
        .is_ok_and(|directory| commit::reach(directory.as_fd()) == commit::Reach::Machine)
}

fn is_stale(error: &io::Error) -> bool {
    error.raw_os_error() == Some(libc::ESTALE)
}

/// Whether the directory that is held open no longer is the one of that name, after `error` in it. `certain` notes that it was found to be,
/// so that this takes its time once.
fn is_replaced(
    directory: &OwnedFd,
    path: &Path,
    seal: &[u8],
    error: &io::Error,
    certain: &OnceLock<()>,
) -> bool {
    if is_stale(error) {
        return true;
    }
    let begin = Instant::now();
    loop {
        let local = commit::reach(directory.as_fd()) == commit::Reach::Machine;
        if has_other_name(directory, path) || !local && has_other_manifest(path, seal) {
            return true;
        }
        let sure = local || certain.get().is_some();
        if sure || begin.elapsed() > DOUBT {
            let _ = certain.set(());
            return false;
        }
        std::thread::sleep(PAUSE);
    }
}

fn has_other_name(directory: &OwnedFd, path: &Path) -> bool {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if let Ok(parent) = file::open_directory(parent) {
        commit::refresh(&parent);
    }
    commit::refresh(directory);
    match (rustix::fs::fstat(directory), rustix::fs::stat(path)) {
        (Ok(held), Ok(named)) => (held.st_dev, held.st_ino) != (named.st_dev, named.st_ino),
        _ => true,
    }
}

/// Whether the manifest at `path` is not the one that begins with `seal`.
fn has_other_manifest(path: &Path, seal: &[u8]) -> bool {
    let mut begin = vec![0; seal.len()];
    let read = file::open_directory(path)
        .and_then(|directory| file::open_regular(directory.as_fd(), manifest::FILE))
        .and_then(|(fd, _)| file::read_at(fd.as_fd(), &mut begin, 0));
    match read {
        Ok(read) => begin[..read] != *seal,
        Err(error) => is_gone(&error),
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
