//! Mapping: tensors as pages of their files. They are compared with their checksums and not copied.

use std::sync::Arc;
use std::time::Instant;

use super::checkpoint::Checkpoint;
use super::job::{Outcome, ReadJob};
use super::plan::{self, Request};
use crate::engine::content::Destination;
use crate::engine::io::files::ShardFile;
use crate::engine::job::Progress;
use crate::engine::options::{Io, Options};
use crate::engine::report::Report;
use crate::error::{Error, MAP, Result};
use crate::sys::map::FileMap;
use crate::telemetry::{self, Kind, Operation};

/// The mapping of each shard of a checkpoint, if one was requested.
pub type Maps = Vec<Option<Arc<FileMap>>>;

impl Checkpoint {
    /// Maps the shards that hold `tensors`, given by number, except shards with only empty tensors. Reads nothing.
    pub fn map(&self, tensors: &[usize]) -> Result<Maps> {
        let mut maps: Maps = vec![None; self.body.shards.len()];
        for &tensor in tensors {
            let entry = self.body.tensors.get(tensor).ok_or_else(no_such_tensor)?;
            if entry.bytes() > 0 && maps[entry.shard()].is_none() {
                maps[entry.shard()] =
                    Some(Arc::new(self.map_shard(entry.shard()).map_err(|error| self.settle(error))?));
            }
        }
        Ok(maps)
    }

    fn map_shard(&self, index: usize) -> Result<FileMap> {
        let shard = &self.body.shards[index];
        let file = self.open_shard(index, false)?;
        let path = self.path_of(&shard.file);
        let ShardFile::Local(file) = file else {
            return Err(Error::Misused("a checkpoint in an object store cannot be mapped"));
        };
        FileMap::new(file.fd(false), shard.bytes as usize).map_err(Error::io(MAP, &path))
    }

    /// Reads every page of `tensors` in `maps`, and compares every extent and the header of each shard with their
    /// checksums. The first difference is an error. The engine in `options` is ignored: the pages of a mapping are in
    /// the page cache.
    pub fn check(
        &self,
        maps: &Maps,
        tensors: &[usize],
        options: &Options,
        progress: Progress<'_>,
    ) -> Result<Report> {
        let options = Options { io: Io::Buffered, ..options.clone() };
        let operation = options.operation(Kind::Load, &self.path);
        let outcome = self.compare_mapped(maps, tensors, &options, &operation, progress);
        let outcome = outcome.map_err(|error| self.settle(error));
        operation.end(telemetry::outcome(&outcome));
        outcome
    }

    fn compare_mapped(
        &self,
        maps: &Maps,
        tensors: &[usize],
        options: &Options,
        operation: &Operation,
        progress: Progress<'_>,
    ) -> Result<Report> {
        let begin = Instant::now();
        let mut requests = Vec::with_capacity(tensors.len());
        let mut bytes = 0;
        for &tensor in tensors {
            let entry = self.body.tensors.get(tensor).ok_or_else(no_such_tensor)?;
            let end = entry.bytes();
            if end > 0 {
                let map = maps.get(entry.shard()).and_then(Option::as_ref).ok_or_else(no_such_tensor)?;
                bytes += end;
                let destination = Destination::Mapped(Arc::clone(map));
                requests.push(Request { tensor, rows: None, destination });
            }
        }
        let choice = self.choice(options, bytes)?;
        let plan = plan::plan(&self.body, requests, true)?;
        let job = ReadJob::new(self, plan, (choice.direct(), options), Outcome::Raise);
        self.check_headers(&job.shards, &mut || progress(0, bytes))?;
        self.run(&job, &choice, options, begin, operation, progress)
    }
}

fn no_such_tensor() -> Error {
    Error::Invalid("this tensor does not exist or is not mapped".to_owned())
}
