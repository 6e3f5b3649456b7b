//! Snapshots: a state is copied, so that it may change while the copy is written. A single process copies it into
//! images of its files, laid out at the call. A rank copies its parts: the files are laid out after the ranks agree.

mod staging;

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

use self::staging::{Counters, Staging};
use crate::engine::content::Content;
use crate::engine::job::Progress;
pub use crate::engine::memory::Memory;
use crate::engine::memory::lock;
use crate::engine::options::{BLOCK_SIZE, Options};
use crate::engine::report::Report;
use crate::error::{Error, Result};
use crate::format::geometry::{PAGE, Placement};
use crate::format::groups::Group;
use crate::format::layout::{self, Plan, Sizes, TensorSpec};
use crate::format::limits::MAX_BYTES;
use crate::save::{Contents, Request, check_size, save};
use crate::sys::mapping::Stretch;

/// The state that a snapshot copies.
#[derive(Debug)]
pub struct State {
    /// The tensors.
    pub tensors: Vec<TensorSpec>,
    /// The source of the bytes of each tensor.
    pub contents: Vec<Content>,
    /// The state's structure, as in [`Request`].
    pub structure: String,
    /// The caller's metadata, as in [`Request`].
    pub metadata: String,
}

/// The inputs, besides tensors, of the layout of a snapshot's files, as in [`Request`].
#[derive(Debug)]
pub struct Layout {
    /// The groups of files.
    pub groups: Vec<Group>,
    /// The size of a shard in bytes.
    pub shard_size: u64,
    /// For each tensor, whether it is declared unchanging. May be empty.
    pub frozen: Vec<bool>,
}

/// The contents of a checkpoint's files.
#[derive(Debug)]
struct Files {
    tensors: Vec<TensorSpec>,
    layout: Layout,
    structure: String,
    metadata: String,
    plan: Plan,
}

#[derive(Debug)]
struct Inner {
    staging: Staging,
    /// `None` for a snapshot of parts.
    files: Option<Files>,
}

/// A part of a state, for a snapshot of parts.
#[derive(Debug)]
pub struct Part {
    /// The source of the bytes of the part.
    pub content: Content,
    /// The size of the part in bytes.
    pub bytes: u64,
    /// Whether the part follows the previous one without a gap, if that one is marked, too. A device copies such parts
    /// in one go.
    pub joins: bool,
}

/// A state that is copied to memory, so that it may change while the copy is written. Either the memory holds the files
/// of a checkpoint as they will be on the disk, including headers (only the manifest is missing), and this writes them;
/// or it holds parts, which another object writes from their [`Self::places`] before this is closed. Each method except
/// the getters and `stop` refuses while another one runs.
#[derive(Debug)]
pub struct Snapshot {
    total: u64,
    size: usize,
    counters: Counters,
    /// `None` once it is closed.
    inner: Mutex<Option<Inner>>,
}

/// Parts of a snapshot begin at multiples of this, because the processor copies fastest to such addresses.
const ALIGNMENT: u64 = 64;

impl Snapshot {
    /// Lays out the files for `state`, as [`save`] would, and refuses one that is too large. Reads no byte of a tensor.
    pub fn new(state: State, layout: Layout, options: &Options) -> Result<Self> {
        let State { tensors, contents, structure, metadata } = state;
        if contents.len() != tensors.len() {
            return Err(Error::Invalid("each tensor needs its content".to_owned()));
        }
        let sizes = Sizes { shard: layout.shard_size, block: options.block_size.unwrap_or(BLOCK_SIZE) };
        let reuse = layout::Reuse { unchanged: &layout.frozen, linked: &[] };
        let plan = layout::lay_out(&tensors, &layout.groups, sizes, &reuse)?;
        check_size(&plan, &tensors, [&structure, &metadata, ""], MAX_BYTES)?;
        let mut places = Vec::with_capacity(tensors.len());
        for (shard, room) in plan.shards.iter().zip(rooms(&plan)) {
            let place = |place: &Placement| Placement { offset: room.start as u64 + place.offset, ..*place };
            places.extend(shard.placements.iter().map(place));
        }
        let size = rooms(&plan).last().map_or(0, |room| room.end);
        let files = Files { tensors, layout, structure, metadata, plan };
        Ok(Self::of((contents, places), size, Some(files)))
    }

    /// Packs parts into memory, in their order.
    #[must_use]
    pub fn of_parts(parts: Vec<Part>) -> Self {
        let mut contents = Vec::with_capacity(parts.len());
        let mut places = Vec::with_capacity(parts.len());
        let (mut end, mut joined) = (0u64, false);
        for (tensor, Part { content, bytes, joins }) in parts.into_iter().enumerate() {
            let offset = if joins && joined { end } else { end.next_multiple_of(ALIGNMENT) };
            (end, joined) = (offset + bytes, joins);
            contents.push(content);
            places.push(Placement { tensor, offset, bytes });
        }
        Self::of((contents, places), end as usize, None)
    }

    fn of((contents, places): (Vec<Content>, Vec<Placement>), size: usize, files: Option<Files>) -> Self {
        let total = places.iter().map(|place| place.bytes).sum();
        let inner = Inner { staging: Staging::new(contents, places), files };
        Self { total, size, counters: Counters::default(), inner: Mutex::new(Some(inner)) }
    }

    /// Bytes of all tensors.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.total
    }

    /// Bytes of memory that the snapshot needs.
    #[must_use]
    pub const fn size(&self) -> usize {
        self.size
    }

    /// Bytes of tensors copied so far.
    #[must_use]
    pub fn staged(&self) -> u64 {
        self.counters.done.load(Ordering::Relaxed)
    }

    /// Makes [`Self::stage`] end soon with [`Error::Interrupted`], now and in later calls.
    pub fn stop(&self) {
        self.counters.stop.store(true, Ordering::Relaxed);
    }

    /// Runs `action`, unless another method runs or the snapshot is closed.
    fn with<T>(&self, action: impl FnOnce(&mut Inner) -> Result<T>) -> Result<T> {
        let mut inner = lock(&self.inner, "the snapshot is in use")?;
        action(inner.as_mut().ok_or(Error::Misused("the snapshot is closed"))?)
    }

    /// Gives the snapshot the memory that it keeps until it is closed.
    pub fn attach(&self, memory: &Arc<Memory>) -> Result<()> {
        self.with(|inner| inner.staging.attach(memory, self.size))
    }

    /// The place of each tensor or part in the memory: its address and its bytes. The caller may copy them there
    /// itself, before [`Self::stage`] is called for the last time, and reports that with [`Self::copied`].
    pub fn places(&self) -> Result<Vec<(usize, u64)>> {
        self.with(|inner| inner.staging.addresses())
    }

    /// Notes that the caller has copied `bytes` of tensors to their places. Refuses more bytes than are missing.
    pub fn copied(&self, bytes: u64) -> Result<()> {
        let add = |done: u64| done.checked_add(bytes).filter(|&done| done <= self.total);
        let added = self.counters.done.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
        added.map(drop).map_err(|_| Error::Invalid("more bytes were copied than the snapshot has".to_owned()))
    }

    /// Copies the tensors whose byte in `wanted` is not 0, with several threads. After the `last` copy, or after a copy
    /// that fails, it does not access the state's memory again.
    pub fn stage(&self, wanted: &[u8], last: bool, options: &Options, progress: Progress<'_>) -> Result<()> {
        self.with(|inner| {
            let tell = || {
                if let Some(begun) = &options.begun {
                    begun.staged(self.staged());
                }
            };
            let mut go_on = || {
                tell();
                progress(self.staged(), self.total)
            };
            let Inner { staging, files } = inner;
            let outcome =
                staging.stage(wanted, last.then_some(self.total), options, &self.counters, &mut go_on);
            tell(); // a copy may end without a call of `go_on` after its last bytes
            outcome?;
            if let Some(files) = files.as_ref().filter(|_| last) {
                files.write_headers(staging.writable()?);
            }
            Ok(())
        })
    }

    /// The files and their names, to read or to send. While an image is kept, the memory cannot serve another snapshot.
    pub fn images(&self) -> Result<Vec<(String, Stretch)>> {
        self.with(|inner| {
            let (files, images) = inner.images()?;
            Ok(files.plan.shards.iter().map(|shard| shard.file.clone()).zip(images).collect())
        })
    }

    /// Writes the snapshot, with further `files`, as [`save`] writes a state. `base` as in [`Request`].
    pub fn save(
        &self,
        path: &Path,
        files: &[(&str, &[u8])],
        overwrite: bool,
        base: Option<&Path>,
        options: &Options,
        progress: Progress<'_>,
    ) -> Result<Report> {
        self.with(|inner| {
            let (state, images) = inner.images()?;
            let request = Request {
                path,
                tensors: &state.tensors,
                groups: &state.layout.groups,
                shard_size: state.layout.shard_size,
                contents: Contents::Images(&state.plan, &images),
                base,
                frozen: &state.layout.frozen,
                structure: &state.structure,
                metadata: &state.metadata,
                files,
                overwrite,
            };
            save(&request, options, progress)
        })
    }

    /// Returns the memory to its owner, and frees everything else.
    pub fn close(&self) -> Result<()> {
        let inner = lock(&self.inner, "the snapshot is in use")?.take();
        inner.map_or(Ok(()), |inner| inner.staging.detach())
    }
}

impl Drop for Snapshot {
    /// Returns the memory to its owner instead of unmapping it, because the owner may have pinned it.
    fn drop(&mut self) {
        let _ = self.close();
    }
}

impl Inner {
    /// The files, and the image of each.
    fn images(&self) -> Result<(&Files, Vec<Stretch>)> {
        let files = self.files.as_ref().ok_or(Error::Misused("the snapshot is of parts, not of files"))?;
        let memory = self.staging.staged()?;
        let ranges = files.plan.shards.iter().zip(rooms(&files.plan));
        let ranges = ranges.map(|(shard, room)| room.start..room.start + shard.bytes as usize);
        let images: Option<_> = ranges.map(|range| Stretch::new(memory, range)).collect();
        Ok((files, images.ok_or(Error::Misused("the snapshot belongs to another process"))?))
    }
}

impl Files {
    fn write_headers(&self, memory: &mut [u8]) {
        for (shard, room) in self.plan.shards.iter().zip(rooms(&self.plan)) {
            memory[room.start..][..shard.header.len()].copy_from_slice(&shard.header);
        }
    }
}

/// The range of each shard's image in the memory of a snapshot, including the rest of its last page.
fn rooms(plan: &Plan) -> impl Iterator<Item = Range<usize>> {
    plan.shards.iter().scan(0, |end, shard| {
        let begin = *end;
        *end += shard.bytes.next_multiple_of(PAGE) as usize;
        Some(begin..*end)
    })
}

#[cfg(test)]
mod tests;
