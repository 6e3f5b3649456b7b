//! Writes units: opens files, moves the units, and makes each file durable after its last unit.

use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use super::assemble::Assembler;
use super::part::Unsynced;
use super::work::Work;
use crate::commit::Workspace;
use crate::engine::choice::Choice;
use crate::engine::io::files::{OpenFile, OpenFiles, ShardFile};
use crate::engine::io::transfer::Transfer;
use crate::engine::job::{Job, Next, Staging, Start, new_staging};
use crate::engine::options::{Io, Options};
use crate::error::{Error, Result};
use crate::format::geometry::PAGE;
use crate::sys::dealt::Dealt;
use crate::sys::file::DataFile;
use crate::sys::slabs::Slab;
use crate::telemetry::{Lane, State};

/// Moves units into the files of a workspace.
pub(crate) struct WriteJob<'a, W> {
    pub(super) work: &'a W,
    workspace: &'a Workspace,
    assembler: Assembler,
    direct: bool,
    strict: bool,
    begin: Instant,
    files: OpenFiles,
    total: u64,
    largest: usize,
    /// Whether the only file stays unsynced until its manifest is written.
    leaves_a_sync: bool,
    /// The unsynced file, once it is written.
    unsynced: OnceLock<Arc<OpenFile>>,
    /// When the last unit reached the device, in nanoseconds after `begin`. After that time, the job only synced.
    pub(crate) written: AtomicU64,
}

impl<'a, W: Work> WriteJob<'a, W> {
    /// Writes `work` into the existing files of `workspace`.
    pub(crate) fn new(
        work: &'a W,
        workspace: &'a Workspace,
        choice: &Choice,
        options: &Options,
        begin: Instant,
    ) -> Self {
        let mut units = vec![0; work.plan().shards.len()];
        let (mut total, mut longest) = (0, 0);
        for unit in (0..work.units()).map(|number| work.unit(number)) {
            units[unit.shard] += 1;
            total += unit.len();
            longest = unit.len().max(longest);
        }
        Self {
            work,
            workspace,
            assembler: Assembler::new(work.units(), choice.direct(), options.zero_copy),
            direct: choice.direct(),
            strict: options.io == Io::Direct,
            begin,
            files: OpenFiles::new(units),
            total,
            largest: longest.next_multiple_of(PAGE) as usize,
            leaves_a_sync: false,
            unsynced: OnceLock::new(),
            written: AtomicU64::new(0),
        }
    }

    /// The same job, but if it has a single unit, the shard stays unsynced until its manifest is written.
    pub(super) fn leaving_a_sync(self) -> Self {
        Self { leaves_a_sync: self.work.units() == 1, ..self }
    }

    /// A unit that is ready to be written. `copy_all` is set when it is written again.
    fn transfer(
        &self,
        number: usize,
        file: Arc<OpenFile>,
        copy_all: bool,
        slab: Staging<'_>,
    ) -> Result<Transfer> {
        let unit = self.work.unit(number);
        let assembled = self.assembler.assemble(self.work, (number, &unit), &file, copy_all, slab)?;
        Ok(assembled.transfer(number, file, unit.start))
    }

    /// A unit that is ready to be written. Callbacks have copied their bytes of it to `slab`.
    fn fetched_transfer(&self, number: usize, file: Arc<OpenFile>, slab: Slab) -> Result<Transfer> {
        let unit = self.work.unit(number);
        let assembled = self.assembler.assemble_fetched(self.work, (number, &unit), &file, slab)?;
        Ok(assembled.transfer(number, file, unit.start))
    }

    fn open(&self, index: usize) -> Result<ShardFile> {
        self.workspace.check_open()?;
        let file = &self.work.plan().shards[index].file;
        let path = || self.workspace.path_of(file);
        let file = DataFile::open_write(self.workspace.directory(), file, self.direct);
        let file = ShardFile::Local(file.map_err(|error| Error::io("open", &path())(error))?);
        if self.strict && !file.is_direct() { Err(Error::no_direct(&path())) } else { Ok(file) }
    }

    /// The file that the workers left unsynced.
    pub(super) fn unsynced(&self) -> Option<Unsynced> {
        let file = Arc::clone(self.unsynced.get()?);
        let index = self.work.unit(0).shard;
        let path = self.workspace.path_of(&self.work.plan().shards[index].file);
        Some(Unsynced { file, path, bytes: self.work.bytes_of(index) })
    }
}

impl<W: Work> Job for WriteJob<'_, W> {
    const WRITE: bool = true;

    fn blocks(&self) -> usize {
        self.work.units()
    }

    fn files(&self) -> usize {
        self.work.files()
    }

    fn total(&self) -> u64 {
        self.total
    }

    fn largest(&self) -> usize {
        self.largest
    }

    fn file(&self, number: usize) -> usize {
        self.work.unit(number).shard
    }

    fn calls(&self) -> bool {
        self.work.calls()
    }

    fn fetched(&self, number: usize) -> Option<usize> {
        self.work.fetched(number).map(|_| self.work.unit(number).padded())
    }

    fn fetch(&self, numbers: Range<usize>, mut memory: Dealt) -> Result<Vec<Dealt>> {
        self.work.fetch(numbers.clone(), &mut memory)?;
        let mut parts = Vec::with_capacity(numbers.len());
        for number in numbers {
            let (part, rest) = memory.split(self.work.unit(number).padded());
            parts.push(part);
            memory = rest;
        }
        Ok(parts)
    }

    fn start(&self, number: usize, fetched: &mut Option<Dealt>, staging: Staging<'_>) -> Result<Start> {
        if !self.work.is_ready(number)? {
            return Ok(Start::Later(State::Peers));
        }
        let index = self.work.unit(number).shard;
        let Some(file) = self.files.acquire(index, || self.open(index))? else {
            // A file is closed only after it is durable.
            return Ok(Start::Later(State::Fsync));
        };
        match fetched.take() {
            Some(part) => self.fetched_transfer(number, file, Slab::Part(part)),
            None => self.transfer(number, file, false, staging),
        }
        .map(Start::Now)
    }

    fn finish(&self, transfer: &mut Transfer, outcome: io::Result<()>, lane: &Lane<'_>) -> Result<Next> {
        let (number, unit) = (transfer.block, self.work.unit(transfer.block));
        let path = || self.workspace.path_of(&self.work.plan().shards[unit.shard].file);
        outcome.map_err(|error| Error::transfer("write", &path(), error, self.strict))?;
        if self.assembler.has_changed(number, &transfer.buf) {
            return self
                .transfer(number, Arc::clone(&transfer.file), true, &mut new_staging)
                .map(Next::Again);
        }
        self.work.written(number);
        let now = u64::try_from(self.begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.written.fetch_max(now, Ordering::Relaxed);
        lane.moved(unit.len());
        if let Some(file) = self.files.release(unit.shard) {
            if self.leaves_a_sync {
                // The manifest follows at once. A file system that must write both makes them durable together.
                let _ = self.unsynced.set(file);
            } else {
                let synced = lane.during(State::Fsync, || file.local()?.sync());
                synced.map_err(|error| Error::io("sync", &path())(error))?;
                lane.operation().durable(self.work.bytes_of(unit.shard));
            }
        }
        Ok(Next::Done)
    }
}
