//! The files of an earlier checkpoint that a save of many ranks links, before the save is laid out. Each rank compares
//! its part ([`RankBase::compare`]). The coordinator combines the results, and links the files in which nothing has
//! changed into the workspace ([`RankBase::take`]). All ranks lay out the rest ([`RankBase::table`]).

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::compare::sums;
use super::held::Held;
use super::sums::{Sums, next};
use super::table::Table;
use crate::commit::Workspace;
use crate::engine::job::Progress;
use crate::engine::options::Options;
use crate::error::{Error, Result};
use crate::format::decode;
use crate::format::manifest::Body;
use crate::read::Checkpoint;
use crate::save::base::LinkedShards;
use crate::share::{Duties, Purpose};

/// The base on a rank.
enum Base {
    /// The checkpoint, which the coordinator has opened.
    Opened(Box<Checkpoint>),
    /// The manifest, which the other ranks have received.
    Told(Box<Body>),
}

impl Base {
    fn body(&self) -> &Body {
        match self {
            Self::Opened(checkpoint) => checkpoint.body(),
            Self::Told(body) => body,
        }
    }
}

/// The part of one rank in linking the files of an earlier checkpoint. See the module.
pub struct RankBase {
    table: Arc<Table>,
    rank: u32,
    duties: Arc<Duties>,
    held: Held,
    options: Options,
    base: OnceLock<Base>,
    prepared: Mutex<Prepared>,
}

/// The linked files, and the coordinator's workspace with them.
#[derive(Debug, Default)]
pub(super) struct Prepared {
    pub(super) workspace: Option<Workspace>,
    pub(super) linked: LinkedShards,
}

const ORDER: &str = "open or know the base once, then compare, take and lay out";

impl RankBase {
    /// The base for `rank`, whose memory is `held`. `table` is the layout of a save that links nothing.
    pub fn new(table: Arc<Table>, rank: u32, held: Held, options: Options) -> Result<Self> {
        let duties = Arc::new(table.share.duties(rank, Purpose::Save)?);
        held.check(&duties)?;
        let prepared = Prepared { workspace: None, linked: LinkedShards::new(&table.state()) };
        let (base, prepared) = (OnceLock::new(), Mutex::new(prepared));
        Ok(Self { table, rank, duties, held, options, base, prepared })
    }

    /// The duties of `rank` in a save of `table`, if this rank computed them.
    pub(super) fn duties(&self, table: &Arc<Table>, rank: u32) -> Option<Arc<Duties>> {
        (Arc::ptr_eq(table, &self.table) && rank == self.rank).then(|| Arc::clone(&self.duties))
    }

    fn prepared(&self) -> MutexGuard<'_, Prepared> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn base(&self) -> Result<&Base> {
        self.base.get().ok_or(Error::Misused(ORDER))
    }

    fn set(&self, base: Base) -> Result<()> {
        self.base.set(base).map_err(|_| Error::Misused(ORDER))
    }

    /// For the coordinator: opens the base. Returns its manifest for the other ranks, or `None` if it cannot be a base,
    /// which becomes a warning of the save.
    pub fn open(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        let linked = &mut self.prepared().linked;
        let Some(base) = linked.open(path, self.table.plan.block_size) else { return Ok(None) };
        let manifest = match base.manifest() {
            Ok(manifest) => manifest,
            Err(error) => {
                linked.warnings.push(format!("base: {error}: every tensor was written"));
                return Ok(None);
            }
        };
        self.set(Base::Opened(Box::new(base)))?;
        Ok(Some(manifest))
    }

    /// For all other ranks: stores the manifest of the base at `path`.
    pub fn know(&self, path: &Path, manifest: &[u8]) -> Result<()> {
        self.set(Base::Told(Box::new(decode::decode(manifest.into(), path)?)))
    }

    /// Sums this rank's part of the base's tensors.
    pub fn compare(&self, progress: Progress<'_>) -> Result<Sums> {
        sums(&self.table, &self.duties, &self.held, self.base()?.body(), &self.options, progress)
    }

    /// For the coordinator: creates the workspace for a save to `path`, and links the files that the ranks found
    /// unchanged. Returns the message for the other ranks. Problems with the base become warnings, and more is written.
    pub fn take(
        &self,
        path: &Path,
        overwrite: bool,
        found: &Sums,
        progress: Progress<'_>,
    ) -> Result<Vec<u8>> {
        let Base::Opened(base) = self.base()? else { return Err(Error::Misused(ORDER)) };
        let same = found.unchanged(&self.table.tensors, base.body());
        let workspace = Workspace::create(path, overwrite)?;
        let prepared = &mut *self.prepared();
        prepared.linked.link(&workspace, &self.table.state(), (base, &same), &self.options, progress)?;
        prepared.workspace = Some(workspace);
        Ok(encode(&prepared.linked))
    }

    /// For all other ranks: stores the result of [`Self::take`].
    pub fn follow(&self, told: &[u8]) -> Result<()> {
        let told = decode(told, self.table.tensors.len())?;
        self.prepared().linked.follow(&self.table.state(), self.base()?.body(), told)
    }

    /// The layout of the files that are not linked.
    pub fn table(&self) -> Result<Arc<Table>> {
        let linked = &self.prepared().linked;
        if !linked.changes_layout(&self.table.state()) {
            return Ok(Arc::clone(&self.table));
        }
        self.table.beside(&linked.reuse()).map(Arc::new)
    }

    /// Removes the workspace, unless a save took it over.
    pub fn close(&self) {
        self.prepared().workspace = None;
    }

    /// Passes the linked files to the save of this rank.
    pub(super) fn give(&self) -> Prepared {
        std::mem::take(&mut *self.prepared())
    }
}

/// The message for the other ranks: the numbers of the linked files, and a bit for each tensor that is expected to stay
/// unchanged.
fn encode(linked: &LinkedShards) -> Vec<u8> {
    let mut all = (linked.numbers.len() as u32).to_le_bytes().to_vec();
    linked.numbers.iter().for_each(|&number| all.extend((number as u32).to_le_bytes()));
    let bits = |some: &[bool]| (0..).zip(some).fold(0, |bits, (at, &one)| bits | u8::from(one) << at);
    all.extend(linked.unchanged.chunks(8).map(bits));
    all
}

/// The inverse of [`encode`], in a save of this many tensors.
fn decode(mut bytes: &[u8], tensors: usize) -> Result<(Vec<bool>, Vec<usize>)> {
    let count = u32::from_le_bytes(next(&mut bytes)?);
    let numbers = (0..count).map(|_| Ok(u32::from_le_bytes(next(&mut bytes)?) as usize));
    let numbers = numbers.collect::<Result<_>>()?;
    if bytes.len() != tensors.div_ceil(8) {
        return Err(Error::Invalid(
            "the coordinator's answer about the base belongs to another state".to_owned(),
        ));
    }
    Ok(((0..tensors).map(|tensor| bytes[tensor / 8] >> (tensor % 8) & 1 == 1).collect(), numbers))
}

#[cfg(test)]
mod tests;
