//! Mapping: tensors as pages of their files, compared with their checksums and not copied.

use std::sync::Arc;
use std::time::Instant;

use super::job::{Outcome, ReadJob};
use super::{Checkpoint, Request};
use crate::error::{Error, Result};
use crate::options::Options;
use crate::report::Report;
use crate::source::Destination;
use crate::sys::map::FileMap;
use crate::telemetry::{self, Kind, Operation};
use crate::worker::{Crew, Tick};

/// For each shard of a checkpoint its mapping, where one was asked for.
pub type Maps = Vec<Option<Arc<FileMap>>>;

impl Checkpoint {
    /// Maps the shards that hold `tensors`, by number. With `verify`, every page of these is read, and every extent compared with its
    /// checksum, and so is the header of each shard; the first difference is an error. Without it nothing is read.
    ///
    /// `options` ask for [`crate::options::Io::Buffered`]: there is no other way to a mapping than the page cache.
    pub fn map(
        &self,
        tensors: &[usize],
        verify: bool,
        options: &Options,
        tick: Tick<'_>,
    ) -> Result<(Maps, Report)> {
        let operation = Operation::begin(Kind::Load, &self.path, options.step);
        let outcome = self.map_and_check(tensors, verify, options, &operation, tick);
        operation.end(telemetry::outcome(&outcome));
        outcome
    }

    fn map_and_check(
        &self,
        tensors: &[usize],
        verify: bool,
        options: &Options,
        operation: &Operation,
        tick: Tick<'_>,
    ) -> Result<(Maps, Report)> {
        let begin = Instant::now();
        let mut maps: Maps = vec![None; self.body.shards.len()];
        let mut requests = Vec::with_capacity(tensors.len());
        let mut bytes = 0;
        for &tensor in tensors {
            let Some(entry) = self.body.tensors.get(tensor) else {
                return Err(Error::Invalid("there is no tensor of this number".to_owned()));
            };
            let end = entry.bytes();
            if end == 0 {
                continue;
            }
            let map = match &maps[entry.shard] {
                Some(map) => Arc::clone(map),
                None => Arc::clone(maps[entry.shard].insert(Arc::new(self.map_shard(entry.shard)?))),
            };
            bytes += end;
            requests.push(Request { tensor, start: 0, end, destination: Destination::Mapped(map) });
        }
        let mut crew = Crew::choose(options, bytes);
        let job = ReadJob::new(self, requests, verify, (crew.direct(), options), Outcome::Raise)?;
        if verify {
            self.check_headers(&job.shards)?;
        }
        let report = self.run(&job, &mut crew, options, begin, operation, tick)?;
        Ok((maps, report))
    }

    fn map_shard(&self, index: usize) -> Result<FileMap> {
        let shard = &self.body.shards[index];
        let file = self.open_shard(index, false)?;
        FileMap::new(file.fd(false), shard.bytes as usize)
            .map_err(Error::io("map", &self.path_of(&shard.file)))
    }
}
