//! Reading: a checkpoint is opened, and byte ranges of its tensors are read. `verify` reads all of it.

pub mod boxes;
mod job;
mod map;
mod plan;
mod replaced;
mod shards;
mod verify;

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use self::job::{Outcome, ReadJob};
pub use self::map::Maps;
pub use self::plan::Request;
use self::replaced::{DOUBT, PAUSE, has_other_name, is_gone, is_local, is_stale};
use self::shards::{Kept, unreadable};
use crate::commit;
use crate::engine::choice::Choice;
use crate::engine::job::Tick;
use crate::engine::options::{Io, Options};
use crate::engine::report::{Damage, Report};
use crate::engine::run::run;
use crate::error::{Error, Result};
use crate::format::manifest::{self, Body};
use crate::sys::file;
use crate::telemetry::{self, Kind, Operation};

/// How long a checkpoint is opened again that is replaced again and again.
const REPLACED_WAIT: Duration = Duration::from_secs(30);
/// Bytes at the manifest's beginning, its checksum among them, that tell it from any other.
const SEAL: usize = 64;
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
    kept: Kept,
}

impl Checkpoint {
    /// Opens the checkpoint at `path`.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_settled(path, false)
    }

    /// Opens the checkpoint at `path`, and all shards if there are at most 64. These stay open, so that they can be read after the
    /// checkpoint was replaced or removed, unless its file system goes by names.
    pub fn open_and_keep(path: &Path) -> Result<Self> {
        Self::open_settled(path, true)
    }

    fn open_settled(path: &Path, keep: bool) -> Result<Self> {
        let give_up = Instant::now() + REPLACED_WAIT;
        let mut doubt = None;
        loop {
            match Self::open_once(path, keep) {
                Err(Error::Replaced { .. }) if Instant::now() < give_up => {}
                // Where a file system goes by names, a manifest may be missing, or another one, from one call to the next.
                Err(Error::Corrupt { .. })
                    if !is_local(path) && doubt.get_or_insert_with(Instant::now).elapsed() < DOUBT => {}
                other => return other,
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn open_once(path: &Path, keep: bool) -> Result<Self> {
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
        let (path, certain, kept) = (path.to_path_buf(), OnceLock::new(), Kept::default());
        let mut checkpoint = Self { path, directory, body, seal, certain, sound_headers, kept };
        if keep {
            checkpoint.keep()?;
        }
        Ok(checkpoint)
    }

    /// Its path, as it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Its directory.
    #[must_use]
    pub fn directory(&self) -> BorrowedFd<'_> {
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
        let bytes = requests.iter().map(|request| request.bytes(&self.body));
        let wanted = bytes.fold(0, u64::saturating_add);
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
            bytes: job.plan.wanted,
            phases: vec![("plan", planned), ("read", seconds - planned)],
            seconds,
            ran,
            warnings: Vec::new(),
            shards: job.shards.len(),
            tensors: job.plan.tensors,
        })
    }

    fn raised(&self, damage: Damage) -> Error {
        let Damage { file, offset, len, tensor, reason } = damage;
        let tensor = tensor.map_or_else(String::new, |name| format!(" (tensor `{name}`)"));
        Error::corrupt(&self.path_of(&file), format!("bytes {offset} to {}{tensor}: {reason}", offset + len))
    }
}
