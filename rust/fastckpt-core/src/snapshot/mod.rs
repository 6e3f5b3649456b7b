//! Snapshots: a state is copied into the images of its files, so that it may change while they are written.

mod staging;

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use self::staging::{Progress, Wanted, rooms};
use crate::engine::content::Content;
use crate::engine::job::Tick;
pub use crate::engine::memory::Memory;
use crate::engine::memory::lock;
use crate::engine::options::{BLOCK_SIZE, Options};
use crate::engine::report::Report;
use crate::error::{Error, Result};
use crate::format::groups::Group;
use crate::format::layout::{self, Plan, TensorSpec};
use crate::format::limits::MAX_BYTES;
use crate::save::{Contents, Request, Reuse, check_size, save};
use crate::sys::mapping::{Mapping, Stretch};

/// The state that a snapshot copies.
#[derive(Debug)]
pub struct State {
    /// The tensors.
    pub tensors: Vec<TensorSpec>,
    /// Where each lies.
    pub contents: Vec<Content>,
    /// The state's structure, as in [`Request`].
    pub structure: String,
    /// The caller's metadata, also as in [`Request`].
    pub metadata: String,
}

/// How far the snapshot is.
#[derive(Debug, PartialEq, Eq)]
enum Phase {
    /// Tensors are still to be copied.
    Staging,
    /// The images are complete.
    Staged,
    /// A copy failed. The images are unusable.
    Failed,
}

#[derive(Debug)]
struct Inner {
    state: State,
    plan: Plan,
    phase: Phase,
    /// The memory's owner, and the memory.
    memory: Option<(Arc<Memory>, Arc<Mapping>)>,
}

/// A state that is copied and then written from the copy. Its memory holds the files of the checkpoint as they will be
/// on the disk, including headers: only the manifest is missing. Each method except the getters and `stop` refuses
/// while another one runs.
#[derive(Debug)]
pub struct Snapshot {
    total: u64,
    size: usize,
    progress: Progress,
    /// `None` once it is closed.
    inner: Mutex<Option<Inner>>,
}

impl Snapshot {
    /// Lays out the files for `state`, as [`save`] would, and refuses one that is too large. Reads no byte of a tensor.
    pub fn new(state: State, groups: &[Group], shard_size: u64, options: &Options) -> Result<Self> {
        if state.contents.len() != state.tensors.len() {
            return Err(Error::Invalid("each tensor needs its content".to_owned()));
        }
        let block_size = options.block_size.unwrap_or(BLOCK_SIZE);
        let plan = layout::plan(&state.tensors, groups, shard_size, block_size)?;
        check_size(&plan, &state.tensors, [&state.structure, &state.metadata, ""], MAX_BYTES)?;
        let total = plan.shards.iter().map(|shard| shard.bytes - shard.header.len() as u64).sum();
        let size = rooms(&plan).last().map_or(0, |room| room.end);
        let inner = Inner { state, plan, phase: Phase::Staging, memory: None };
        Ok(Self { total, size, progress: Progress::default(), inner: Mutex::new(Some(inner)) })
    }

    /// Bytes of all tensors.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// Bytes of memory that it needs.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.size
    }

    /// Bytes of tensors copied so far.
    #[must_use]
    pub fn staged(&self) -> u64 {
        self.progress.done.load(Ordering::Relaxed)
    }

    /// Makes [`Self::stage`] end soon with [`Error::Interrupted`], now and in later calls.
    pub fn stop(&self) {
        self.progress.stop.store(true, Ordering::Relaxed);
    }

    /// Runs `action`, unless another method runs or the snapshot is closed.
    fn with<T>(&self, action: impl FnOnce(&mut Inner) -> Result<T>) -> Result<T> {
        let mut inner = lock(&self.inner, "the snapshot is in use")?;
        action(inner.as_mut().ok_or(Error::Misused("the snapshot is closed"))?)
    }

    /// Gives the snapshot the memory that it keeps until it is closed.
    pub fn attach(&self, memory: &Arc<Memory>) -> Result<()> {
        self.with(|inner| {
            if memory.size() < self.size {
                return Err(Error::Invalid("the snapshot's memory is too small".to_owned()));
            }
            if inner.memory.is_some() {
                return Err(Error::Misused("the snapshot has memory"));
            }
            inner.memory = Some((Arc::clone(memory), memory.take()?));
            Ok(())
        })
    }

    /// Where each tensor belongs in the memory: its address and its bytes. The caller may copy tensors there itself,
    /// before [`Self::stage`] is called for the last time, and says so with [`Self::copied`].
    pub fn places(&self) -> Result<Vec<(usize, u64)>> {
        self.with(|inner| {
            let memory =
                inner.memory.as_ref().ok_or(Error::Misused("the snapshot has no memory"))?.0.address();
            let rooms: Vec<_> = rooms(&inner.plan).collect();
            let place = |(spec, &(shard, offset)): (&TensorSpec, &(usize, u64))| {
                (memory + rooms[shard].start + offset as usize, spec.bytes().unwrap_or(0))
            };
            Ok(inner.state.tensors.iter().zip(&inner.plan.places).map(place).collect())
        })
    }

    /// Notes that the caller has copied `bytes` of tensors to their places: these copies have ended. Refuses more than
    /// were missing.
    pub fn copied(&self, bytes: u64) -> Result<()> {
        let add = |done: u64| done.checked_add(bytes).filter(|&done| done <= self.total);
        let added = self.progress.done.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        added.map(drop).map_err(|_| Error::Invalid("more bytes were copied than the snapshot has".to_owned()))
    }

    /// Copies the tensors whose byte in `wanted` is not 0, with several threads. After the `last` copy, or one that
    /// fails, it does not look at the state's own memory again.
    pub fn stage(&self, wanted: &[u8], last: bool, options: &Options, tick: Tick<'_>) -> Result<()> {
        self.with(|inner| {
            let Inner { state, plan, phase, memory } = inner;
            if *phase != Phase::Staging {
                return Err(Error::Misused("the snapshot is staged, or its staging failed"));
            }
            if wanted.len() != state.tensors.len() {
                return Err(Error::Invalid("there must be one byte for each tensor".to_owned()));
            }
            let (_, memory) = memory.as_mut().ok_or(Error::Misused("the snapshot has no memory"))?;
            let memory = Arc::get_mut(memory).ok_or(Error::Misused("the snapshot's memory is in use"))?;
            let wanted = Wanted { tensors: wanted, headers: last };
            let mut tick = |done, total| {
                if let Some(begun) = &options.begun {
                    begun.staged(done);
                }
                tick(done, total)
            };
            let mut outcome =
                staging::copy(&state.contents, plan, wanted, memory, options, &self.progress, &mut tick);
            // What was not copied would be bytes of an earlier snapshot with correct checksums.
            if last && outcome.is_ok() && self.staged() != self.total {
                outcome = Err(Error::Misused("the snapshot is not whole: not every tensor was copied"));
            }
            if last || outcome.is_err() {
                state.contents = Vec::new();
                *phase = if outcome.is_ok() { Phase::Staged } else { Phase::Failed };
            }
            outcome
        })
    }

    /// The files with their names, to look at or to send. While one of them is kept, the memory serves no other
    /// snapshot.
    pub fn images(&self) -> Result<Vec<(String, Stretch)>> {
        self.with(|inner| {
            let names = inner.plan.shards.iter().map(|shard| shard.file.clone());
            Ok(names.zip(inner.images()?).collect())
        })
    }

    /// Writes the snapshot, with further `files`, as [`save`] writes a state. `reuse` as in [`Request`].
    pub fn save(
        &self,
        path: &Path,
        files: &[(&str, &[u8])],
        overwrite: bool,
        reuse: Option<Reuse<'_>>,
        options: &Options,
        tick: Tick<'_>,
    ) -> Result<Report> {
        self.with(|inner| {
            let images = inner.images()?;
            let Inner { state, plan, .. } = inner;
            let request = Request {
                path,
                tensors: &state.tensors,
                contents: Contents::Images(plan, &images),
                reuse,
                structure: &state.structure,
                metadata: &state.metadata,
                files,
                overwrite,
            };
            save(&request, options, tick)
        })
    }

    /// Gives its memory back and frees everything else.
    pub fn close(&self) -> Result<()> {
        let inner = lock(&self.inner, "the snapshot is in use")?.take();
        let memory = inner.and_then(|inner| inner.memory);
        memory.map_or(Ok(()), |(owner, mapping)| owner.give(mapping))
    }
}

impl Drop for Snapshot {
    /// Gives its memory back instead of unmapping it, because its owner may have pinned it.
    fn drop(&mut self) {
        let _ = self.close();
    }
}

impl Inner {
    fn images(&self) -> Result<Vec<Stretch>> {
        let memory = self.memory.as_ref().filter(|_| self.phase == Phase::Staged);
        let (_, memory) = memory.ok_or(Error::Misused("the snapshot is not staged"))?;
        let ranges = self
            .plan
            .shards
            .iter()
            .zip(rooms(&self.plan))
            .map(|(shard, room)| room.start..room.start + shard.bytes as usize);
        let images: Option<_> = ranges.map(|range| Stretch::new(memory, range)).collect();
        images.ok_or(Error::Misused("the snapshot belongs to another process"))
    }
}

#[cfg(test)]
mod tests;
