//! Saving: plan, write, sync, commit.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use serde_json::value::RawValue;

use crate::align::{self, PAGE};
use crate::checksum::{self, Side};
use crate::commit::Workspace;
use crate::error::{Error, Result};
use crate::io::files::OpenFiles;
use crate::manifest::{self, Body, Saved, ShardEntry, TensorEntry, TrueType, Writer};
use crate::options::Options;
use crate::plan::{self, Extent, Plan, Shard, TensorSpec};
use crate::report::Report;
use crate::source::Content;
use crate::sys::buf::{Buf, Slab};
use crate::sys::file::DataFile;
use crate::telemetry::{self, Kind, Lane, Operation, Phase, State};
use crate::worker::{self, Crew, Job, Tick, Transfer};

/// What is to be saved, beside the tensors' content.
#[derive(Debug)]
pub struct Request<'a> {
    /// The checkpoint's directory.
    pub path: &'a Path,
    /// The tensors.
    pub tensors: &'a [TensorSpec],
    /// Where each lies.
    pub contents: &'a [Content],
    /// The state's structure: an array of tokens, JSON.
    pub structure: &'a str,
    /// The caller's metadata: likewise.
    pub metadata: &'a str,
    /// Whether a checkpoint of this name may be replaced.
    pub overwrite: bool,
    /// Target size of a shard in bytes.
    pub shard_size: u64,
}

/// Writes a checkpoint. When this returns it is durable and visible; when it fails nothing of it is left, and what was
/// there before is untouched. The one exception: if only the very last step fails, the sync of the parent directory after the rename,
/// the new checkpoint has the name, but may not survive a power cut.
pub fn save(request: &Request<'_>, options: &Options, tick: Tick<'_>) -> Result<Report> {
    let operation = Operation::begin(Kind::Save, request.path, options.step);
    let outcome = write(request, options, &operation, tick);
    operation.end(telemetry::outcome(&outcome));
    outcome
}

fn write(request: &Request<'_>, options: &Options, operation: &Operation, tick: Tick<'_>) -> Result<Report> {
    let begin = Instant::now();
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    let structure = tokens("structure", request.structure)?;
    let metadata = tokens("metadata", request.metadata)?;
    if request.contents.len() != request.tensors.len() {
        return Err(Error::Invalid("each tensor needs its content".to_owned()));
    }
    let mut crew = Crew::choose(options);
    let plan = plan::plan(request.tensors, request.shard_size, crew.threads)?;
    let workspace = Workspace::create(request.path, request.overwrite)?;
    for shard in &plan.shards {
        // The last block is written whole, so its end must be inside the allocation too.
        DataFile::create(workspace.directory(), &shard.file, align::up(shard.bytes, PAGE))
            .map_err(Error::io("allocate", &workspace.path_of(&shard.file)))?;
    }
    let planned = begin.elapsed().as_secs_f64();

    let job = WriteJob::new(&plan, request, &workspace, &crew, begin);
    let blocks = worker::run(&job, &mut crew, options, plan.block_size, operation, tick)?;
    operation.phase(Phase::Fsync);
    operation.phase(Phase::Commit);
    let synced = begin.elapsed().as_secs_f64();
    let written = (job.written.load(Ordering::Relaxed) as f64 / 1e9).clamp(planned, synced);

    let bytes = plan.shards.iter().map(|shard| shard.bytes - shard.header.len() as u64).sum();
    let saved = Saved {
        engine: crew.engine.name().to_owned(),
        fallback: crew.fallback.as_ref().map(|fallback| fallback.reason.clone()),
        threads: crew.threads as u64,
        seconds: synced,
        gigabytes_per_second: bytes as f64 / synced.max(1e-9) / 1e9,
    };
    let body = job.body(created, saved, structure, metadata);
    if body.shards.len() > 1 {
        workspace.write_file(manifest::INDEX_FILE, &manifest::encode_index(&body)?)?;
    }
    workspace.write_file(manifest::FILE, &manifest::encode(&body)?)?;
    let shards = plan.shards.iter().map(|shard| (shard.file.as_str(), shard.bytes));
    workspace.commit(shards)?;
    let seconds = begin.elapsed().as_secs_f64();
    Ok(Report {
        bytes,
        phases: vec![
            ("plan", planned),
            ("write", written - planned),
            ("fsync", synced - written),
            ("commit", seconds - synced),
        ],
        seconds,
        threads: crew.threads,
        engine: crew.engine,
        fallback: crew.fallback,
        blocks,
        shards: plan.shards.len(),
        tensors: request.tensors.len(),
    })
}

fn tokens(what: &str, json: &str) -> Result<Box<RawValue>> {
    manifest::check_tokens(what, json).map_err(Error::Invalid)?;
    RawValue::from_string(json.to_owned()).map_err(|error| Error::Invalid(format!("{what}: {error}")))
}

/// Fills blocks from the tensors, and takes note of their checksums.
struct WriteJob<'a> {
    plan: &'a Plan,
    request: &'a Request<'a>,
    workspace: &'a Workspace,
    direct: bool,
    begin: Instant,
    files: OpenFiles,
    /// Number of the first block of each shard, and one more.
    first_block: Vec<usize>,
    /// Number of the first extent of each tensor, and one more.
    first_extent: Vec<usize>,
    extent_crcs: Vec<AtomicU64>,
    block_crcs: Vec<AtomicU64>,
    /// When the last block was on the device, nanoseconds after `begin`; what came later was syncing.
    written: AtomicU64,
}

/// The sums before each element, and the sum of all.
fn running_sum(counts: impl Iterator<Item = usize>) -> Vec<usize> {
    let mut all = vec![0];
    all.extend(counts.scan(0, |sum, count| {
        *sum += count;
        Some(*sum)
    }));
    all
}

impl<'a> WriteJob<'a> {
    fn new(
        plan: &'a Plan,
        request: &'a Request<'a>,
        workspace: &'a Workspace,
        crew: &Crew,
        begin: Instant,
    ) -> Self {
        let blocks: Vec<usize> =
            plan.shards.iter().map(|shard| shard.bytes.div_ceil(plan.block_size) as usize).collect();
        let extents = request.tensors.iter().zip(&plan.places).map(|(tensor, &(_, offset))| {
            plan::extent_count(offset, tensor.bytes().unwrap_or(0), plan.block_size) as usize
        });
        let first_block = running_sum(blocks.iter().copied());
        let first_extent = running_sum(extents);
        let zeros =
            |sums: &[usize]| (0..sums.last().copied().unwrap_or(0)).map(|_| AtomicU64::new(0)).collect();
        Self {
            plan,
            request,
            workspace,
            direct: crew.direct(),
            begin,
            files: OpenFiles::new(blocks),
            extent_crcs: zeros(&first_extent),
            block_crcs: zeros(&first_block),
            first_block,
            first_extent,
            written: AtomicU64::new(0),
        }
    }

    /// The shard that `block` belongs to, and where in it the block begins.
    fn locate(&self, block: usize) -> (usize, u64) {
        let shard = self.first_block.partition_point(|&first| first <= block) - 1;
        (shard, (block - self.first_block[shard]) as u64 * self.plan.block_size)
    }

    /// Copies the part of `shard` that begins at `offset` into `slab` and returns its CRC.
    fn fill(&self, shard: &Shard, offset: u64, slab: &mut [u8]) -> Result<u64> {
        let end = offset + slab.len() as u64;
        let header =
            shard.header.get(offset as usize..shard.header.len().min(end as usize)).unwrap_or_default();
        slab[..header.len()].copy_from_slice(header);
        let mut whole = None;
        for placement in plan::touching(&shard.placements, offset..end) {
            let Some(extent) = plan::extent(placement, offset, self.plan.block_size) else { continue };
            let at = (extent.offset - offset) as usize;
            let to = &mut slab[at..at + extent.len as usize];
            let crc = self.copy(&extent, to)?;
            let number = self.first_extent[extent.tensor] + extent.index as usize;
            self.extent_crcs[number].store(crc, Ordering::Relaxed);
            whole = (extent.len == end - offset).then_some(crc);
        }
        // Combining the CRCs of many small extents would cost more than one more pass over a block in cache.
        Ok(whole.unwrap_or_else(|| checksum::of(slab)))
    }

    fn copy(&self, extent: &Extent, to: &mut [u8]) -> Result<u64> {
        match &self.request.contents[extent.tensor] {
            Content::Memory(source) => {
                let start = extent.start as usize;
                let from = source.bytes().get(start..start + to.len());
                let from =
                    from.ok_or_else(|| Error::Invalid("a tensor is shorter than its shape".to_owned()))?;
                Ok(checksum::copy(to, from, Side::Source))
            }
            Content::Pull(fill) => {
                fill(extent.start, to).map_err(Error::Callback)?;
                Ok(checksum::of(to))
            }
        }
    }

    /// The manifest, once all blocks are written.
    fn body(&self, created: f64, saved: Saved, structure: Box<RawValue>, metadata: Box<RawValue>) -> Body {
        let load = |crc: &AtomicU64| crc.load(Ordering::Relaxed);
        let shards = self.plan.shards.iter().enumerate().map(|(index, shard)| {
            let mut left = shard.bytes;
            let crcs = &self.block_crcs[self.first_block[index]..self.first_block[index + 1]];
            let crc = crcs.iter().fold(checksum::of(&[]), |all, crc| {
                let len = left.min(self.plan.block_size);
                left -= len;
                checksum::combine(all, load(crc), len)
            });
            ShardEntry {
                file: shard.file.clone(),
                bytes: shard.bytes,
                data_offset: shard.header.len() as u64,
                header_crc: checksum::to_hex(checksum::of(&shard.header)),
                crc: checksum::to_hex(crc),
            }
        });
        let tensors = self.request.tensors.iter().enumerate().map(|(index, tensor)| {
            let crcs = &self.extent_crcs[self.first_extent[index]..self.first_extent[index + 1]];
            let (shard, offset) = self.plan.places[index];
            TensorEntry {
                name: tensor.name.clone(),
                dtype: tensor.dtype,
                shape: tensor.shape.clone(),
                shard,
                offset,
                crc: crcs.iter().map(|crc| checksum::to_hex(load(crc))).collect(),
                true_type: tensor.true_type.clone().map(|(dtype, shape)| TrueType { dtype, shape }),
            }
        });
        Body {
            writer: Writer { name: "fastckpt".to_owned(), version: env!("CARGO_PKG_VERSION").to_owned() },
            created,
            saved,
            block_size: self.plan.block_size,
            shards: shards.collect(),
            tensors: tensors.collect(),
            structure,
            metadata,
        }
    }
}

impl Job for WriteJob<'_> {
    const WRITE: bool = true;

    fn blocks(&self) -> usize {
        self.block_crcs.len()
    }

    fn files(&self) -> usize {
        self.plan.shards.len()
    }

    fn total(&self) -> u64 {
        self.plan.shards.iter().map(|shard| shard.bytes).sum()
    }

    fn largest(&self) -> usize {
        let longest = self.plan.shards.iter().map(|shard| shard.bytes).max().unwrap_or(0);
        align::up(longest.min(self.plan.block_size), PAGE) as usize
    }

    fn file(&self, block: usize) -> usize {
        self.locate(block).0
    }

    fn start(&self, block: usize, slab: &mut dyn FnMut(usize) -> Result<Slab>) -> Result<Transfer> {
        let (index, offset) = self.locate(block);
        let shard = &self.plan.shards[index];
        let file = self.files.acquire(index, || {
            DataFile::open_write(self.workspace.directory(), &shard.file, self.direct)
                .map_err(Error::io("open", &self.workspace.path_of(&shard.file)))
        })?;
        let need = (shard.bytes - offset).min(self.plan.block_size) as usize;
        let mut slab = slab(align::up(need as u64, PAGE) as usize)?;
        let crc = self.fill(shard, offset, &mut slab[..need])?;
        self.block_crcs[block].store(crc, Ordering::Relaxed);
        let len = if file.is_direct() { align::up(need as u64, PAGE) as usize } else { need };
        slab[need..len].fill(0); // goes to the disk until the file is cut to its length
        Ok(Transfer { file, offset, range: 0..len, need: len, moved: 0, buf: Buf::Slab(slab) })
    }

    fn finish(
        &self,
        block: usize,
        transfer: &mut Transfer,
        moved: io::Result<()>,
        lane: &Lane<'_>,
    ) -> Result<()> {
        let (index, _) = self.locate(block);
        let shard = &self.plan.shards[index];
        let path = || self.workspace.path_of(&shard.file);
        moved.map_err(|error| Error::io("write", &path())(error))?;
        let now = u64::try_from(self.begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.written.fetch_max(now, Ordering::Relaxed);
        lane.moved((shard.bytes - transfer.offset).min(self.plan.block_size));
        if let Some(file) = self.files.release(index) {
            lane.state(State::Fsync);
            file.finish(shard.bytes).map_err(|error| Error::io("sync", &path())(error))?;
            lane.operation().durable(shard.bytes);
        }
        Ok(())
    }
}
