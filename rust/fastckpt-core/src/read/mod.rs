//! Reading: opens a checkpoint and reads byte ranges of its tensors. `verify` reads all of it.

pub mod boxes;
mod checkpoint;
mod copy;
mod job;
mod map;
mod place;
mod plan;
mod replaced;
mod verify;

use std::sync::PoisonError;
use std::time::Instant;

pub use self::checkpoint::Checkpoint;
use self::job::{Outcome, ReadJob};
pub use self::job::{Stop, Sum};
pub use self::map::Maps;
pub use self::plan::{Request, Wanted};
use crate::engine::choice::Choice;
use crate::engine::job::Progress;
use crate::engine::options::{Io, Options};
use crate::engine::report::{Damage, Linked, Report};
use crate::engine::run::run;
use crate::error::{DIRECT_OVER_NETWORK, Error, Result};
use crate::format::checksum;
use crate::format::geometry;
use crate::format::manifest::TensorEntry;
use crate::telemetry::{self, Kind, Operation};

impl Checkpoint {
    /// Reads `requests`. With `verify`, reads in full every extent that they touch, and compares it and the header of
    /// each shard with their checksums. The first difference is an error. Other destinations may be filled by then.
    pub fn read(
        &self,
        requests: Vec<Request>,
        verify: bool,
        options: &Options,
        progress: Progress<'_>,
    ) -> Result<Report> {
        let operation = options.operation(Kind::Load, &self.path);
        let outcome =
            self.load(requests, verify, options, &operation, progress).map_err(|error| self.settle(error));
        operation.end(telemetry::outcome(&outcome));
        outcome
    }

    fn load(
        &self,
        requests: Vec<Request>,
        verify: bool,
        options: &Options,
        operation: &Operation,
        progress: Progress<'_>,
    ) -> Result<Report> {
        let begin = Instant::now();
        let bytes = requests.iter().map(|request| request.bytes(&self.body));
        let wanted = bytes.fold(0, u64::saturating_add);
        let shared =
            options.io == Io::Auto && options.ranks().share(&self.path) && self.is_shared(&requests, wanted);
        let choice = if shared {
            // Through the page cache, the first rank that needs a page reads it, and the others wait for it.
            Choice::new(&Options { io: Io::Buffered, ..options.clone() }, wanted)
        } else {
            self.choice(options, wanted)?
        };
        let plan = plan::plan(&self.body, requests, verify)?;
        let job = ReadJob::new(self, plan, (choice.direct(), options), Outcome::Raise);
        if verify {
            self.check_headers(&job.shards, &mut || progress(0, job.plan.read))?;
        }
        self.run(&job, &choice, options, begin, operation, progress)
    }

    /// Whether other ranks of the node probably read the same `bytes`. This is a guess. A rank that reads parts of
    /// tensors reads its own parts. A rank that reads some tensors may share them with other ranks. In that case, each
    /// rank reads from a local disk, but slow storage of several machines is read once.
    fn is_shared(&self, requests: &[Request], bytes: u64) -> bool {
        let tensors = &self.body.tensors;
        let size = |request: &Request| tensors.get(request.tensor).map_or(0, TensorEntry::bytes);
        let whole = |request: &Request| request.bytes(&self.body) >= size(request);
        let whole = self.directory().is_some() && requests.iter().all(whole);
        whole && (bytes >= tensors.iter().map(TensorEntry::bytes).sum() || self.is_far())
    }

    /// Chooses the engine for reading `bytes`.
    fn choice(&self, options: &Options, bytes: u64) -> Result<Choice> {
        match (self.is_stored(), options.io) {
            (false, _) => Ok(Choice::new(options, bytes)),
            (true, Io::Direct) => {
                let error = std::io::Error::from_raw_os_error(libc::EINVAL);
                Err(Error::io(DIRECT_OVER_NETWORK, &self.path)(error))
            }
            (true, _) => Ok(Choice::stored(options)),
        }
    }

    /// Reads ranges of tensors as part of an operation of the caller. Ranges may overlap, and their bytes are read
    /// once. `verify` as in [`Self::read`]. Also returns the checksums of ranges that are read apart. With `stop`,
    /// destinations may wait for other processes; `stop` ends their waits after a failure.
    pub fn read_ranges(
        &self,
        wanted: Vec<Wanted>,
        verify: bool,
        options: &Options,
        (operation, stop): (&Operation, Option<Stop<'_>>),
        progress: Progress<'_>,
    ) -> Result<(Report, Vec<Sum>)> {
        let begin = Instant::now();
        let plan = plan::plan_ranges(&self.body, wanted, verify)?;
        let choice = self.choice(options, plan.read)?;
        let mut job = ReadJob::new(self, plan, (choice.direct(), options), Outcome::Raise);
        job.stop = stop;
        let mut read = || {
            if verify {
                self.check_headers(&job.shards, &mut || progress(0, job.plan.read))?;
            }
            self.run(&job, &choice, options, begin, operation, progress)
        };
        let report = read().map_err(|error| self.settle(error))?;
        Ok((report, job.sums.into_inner().unwrap_or_else(PoisonError::into_inner)))
    }

    /// Compares the checksums of whole extents with what was written.
    pub fn compare(&self, sums: &[Sum]) -> Result<()> {
        for sum in sums {
            let entry = self.body.tensors.get(sum.tensor);
            let extents = entry.map(|entry| (entry, entry.placement(sum.tensor)));
            let found = extents.and_then(|(entry, place)| {
                let size = self.body.block_size;
                let extent = geometry::extent(&place, geometry::down(sum.offset, size), size)?;
                let whole = (extent.offset, extent.len) == (sum.offset, sum.len);
                Some((entry, entry.extent_crc(extent.index).filter(|_| whole)?))
            });
            let Some((entry, wanted)) = found else {
                let what = format!("a block was read in part: {} bytes at byte {}", sum.len, sum.offset);
                return Err(Error::Invalid(what));
            };
            if wanted != sum.crc {
                return Err(self.settle(self.raised(Damage {
                    file: self.body.shards[entry.shard()].file.clone(),
                    offset: sum.offset,
                    len: sum.len,
                    tensor: Some(entry.name().to_owned()),
                    reason: checksum::differs(sum.crc, wanted),
                })));
            }
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
        progress: Progress<'_>,
    ) -> Result<Report> {
        let planned = begin.elapsed().as_secs_f64();
        let ran = run(job, choice, options, self.body.block_size, operation, progress)?;
        let seconds = begin.elapsed().as_secs_f64();
        Ok(Report {
            bytes: job.plan.wanted,
            phases: vec![("plan", planned), ("read", seconds - planned)],
            seconds,
            ran,
            warnings: Vec::new(),
            shards: job.shards.len(),
            tensors: job.plan.tensors,
            linked: Linked::default(),
        })
    }
}
