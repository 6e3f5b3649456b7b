//! Verification: compares every byte with its checksum and finds all damage, not only the first.

use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use super::checkpoint::Checkpoint;
use super::job::{Outcome, ReadJob};
use super::plan::{self, Request};
use crate::engine::content::Destination;
use crate::engine::job::Progress;
use crate::engine::options::Options;
use crate::engine::report::{Damage, Report};
use crate::error::{Error, Result};
use crate::format::checksum;
use crate::format::geometry;
use crate::format::manifest::{ShardEntry, TensorEntry};
use crate::telemetry::{self, Call, Kind, Operation};

impl Checkpoint {
    /// Compares every byte with its checksum and returns all differences.
    pub fn verify(&self, options: &Options, progress: Progress<'_>) -> Result<(Report, Vec<Damage>)> {
        let operation = options.operation(Kind::Verify, &self.path);
        let outcome = self.compare_all(options, &operation, progress).map_err(|error| self.settle(error));
        operation.end(telemetry::outcome(&outcome));
        outcome
    }

    fn compare_all(
        &self,
        options: &Options,
        operation: &Operation,
        progress: Progress<'_>,
    ) -> Result<(Report, Vec<Damage>)> {
        let begin = Instant::now();
        let bytes = self.body.shards.iter().fold(0, |sum: u64, shard| sum.saturating_add(shard.bytes));
        let choice = self.choice(options, bytes)?;
        let mut damage = Vec::new();
        let mut readable = vec![true; self.body.shards.len()];
        let mut tensors = vec![Vec::new(); self.body.shards.len()];
        for tensor in &self.body.tensors {
            tensors[tensor.shard()].push(tensor);
        }
        for (index, shard) in self.body.shards.iter().enumerate() {
            match self.open_shard(index, false) {
                Ok(_) => damage.extend(self.check_header(index)?),
                Err(Error::Corrupt { what, .. }) => {
                    let found = self.open_file(index, false).ok().map(|(_, len)| len);
                    let (found, missing) = (found.unwrap_or(0), found.is_none());
                    readable[index] = !missing;
                    let offset = found.min(shard.bytes);
                    let len = found.max(shard.bytes) - offset;
                    if missing {
                        damage.extend(lost(shard, &tensors[index], &what));
                    }
                    damage.push(Damage { file: shard.file.clone(), offset, len, tensor: None, reason: what });
                    if found >= shard.data_offset {
                        damage.extend(self.check_header(index)?);
                    }
                }
                Err(error) => return Err(error),
            }
        }
        let requests = self.body.tensors.iter().enumerate().filter(|(_, tensor)| readable[tensor.shard()]);
        let requests =
            requests.map(|(tensor, _)| Request { tensor, rows: None, destination: Destination::Nowhere });
        let plan = plan::plan(&self.body, requests.collect(), true)?;
        let outcome = Outcome::Collect(Mutex::default());
        let mut job = ReadJob::new(self, plan, (choice.direct(), options), outcome);
        job.from_device = true;
        let report = self.run(&job, &choice, options, begin, operation, progress)?;
        if let Outcome::Collect(found) = job.outcome {
            damage.append(&mut found.into_inner().unwrap_or_else(PoisonError::into_inner));
        }
        damage.extend(self.check_sums());
        damage.sort();
        damage.dedup();
        if !damage.is_empty() && self.is_other() {
            return Err(Error::Replaced { path: self.path.clone() });
        }
        Ok((report, damage))
    }

    /// Compares every byte of one shard with its checksum. The first difference is an error. The monitor shows the
    /// operation as a verification.
    pub fn check_shard(&self, index: usize, options: &Options, progress: Progress<'_>) -> Result<()> {
        // The verification begins now, not when the save was called, so its `Call` has no earlier time.
        let call = Call { at: None, ..options.call };
        let operation = Operation::begin(Kind::Verify, &self.path, call, &options.environment);
        let mut check = || {
            let begin = Instant::now();
            self.check_headers(&[index], &mut || true)?;
            let tensors = self.body.tensors.iter().enumerate().filter(|(_, tensor)| tensor.shard() == index);
            let request = |(tensor, _)| Request { tensor, rows: None, destination: Destination::Nowhere };
            let plan = plan::plan(&self.body, tensors.map(request).collect(), true)?;
            let choice = self.choice(options, self.body.shards[index].bytes)?;
            let mut job = ReadJob::new(self, plan, (choice.direct(), options), Outcome::Raise);
            job.from_device = true;
            self.run(&job, &choice, options, begin, &operation, &mut *progress).map(drop)
        };
        let outcome = check().map_err(|error| self.settle(error));
        operation.end(telemetry::outcome(&outcome));
        outcome
    }

    /// Compares the checksum of each whole shard with the checksums of its parts. Copies in other places are checked
    /// against the checksum of the whole shard.
    fn check_sums(&self) -> Vec<Damage> {
        let size = self.body.block_size;
        let mut sums: Vec<Option<u64>> =
            self.body.shards.iter().map(|shard| checksum::from_hex(shard.header_crc.as_bytes())).collect();
        let mut order: Vec<_> = self.body.tensors.iter().collect();
        order.sort_by_key(|tensor| (tensor.shard(), tensor.offset));
        for tensor in order {
            let sum = &mut sums[tensor.shard()];
            for (extent, _) in geometry::extents(tensor.placement(0), 0..tensor.bytes(), size) {
                let crc = tensor.extent_crc(extent.index);
                *sum = sum.zip(crc).map(|(all, crc)| checksum::combine(all, crc, extent.len));
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
}

/// The damage of all `tensors` of a shard that cannot be read at all.
fn lost(shard: &ShardEntry, tensors: &[&TensorEntry], reason: &str) -> impl Iterator<Item = Damage> {
    tensors.iter().filter(|tensor| tensor.bytes() > 0).map(move |tensor| Damage {
        file: shard.file.clone(),
        offset: tensor.offset,
        len: tensor.bytes(),
        tensor: Some(tensor.name().to_owned()),
        reason: reason.to_owned(),
    })
}
