//! What a save of many ranks takes over from an earlier checkpoint, before it is laid out. Each rank compares what it has
//! ([`RankBase::compare`]). The coordinator puts that together, and links the files in which nothing has changed into
//! the workspace ([`RankBase::take`]). All lay out what is left ([`RankBase::table`]).

use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use super::compare::sums;
use super::held::Held;
use super::sums::{Sums, next};
use super::table::Table;
use crate::commit::Workspace;
use crate::engine::job::Tick;
use crate::engine::options::Options;
use crate::error::{Error, Result};
use crate::format::decode;
use crate::format::groups::Group;
use crate::format::manifest::Body;
use crate::read::Checkpoint;
use crate::save::Reuse;
use crate::save::base::Beside;
use crate::share::{Duties, Grain};

/// The base, as a rank has it.
enum Base {
    /// The coordinator has opened it.
    Opened(Box<Checkpoint>),
    /// The others have its manifest.
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

/// See the module.
pub struct RankBase {
    table: Arc<Table>,
    duties: Duties,
    held: Held,
    groups: Vec<Group>,
    shard_size: u64,
    frozen: Vec<bool>,
    options: Options,
    base: OnceLock<Base>,
    taken: Mutex<Taken>,
}

/// What was taken over, and the coordinator's workspace with it.
#[derive(Debug, Default)]
pub(super) struct Taken {
    pub(super) workspace: Option<Workspace>,
    pub(super) beside: Beside,
}

const ORDER: &str = "open or know the base once, then compare, take and lay out";

impl RankBase {
    /// For `rank`, which holds `held`. `table` is the layout of a save that takes over nothing, made with the groups and
    /// the shard size of `reuse`, whose `base` does not matter.
    pub fn new(
        table: Arc<Table>,
        rank: u32,
        held: Held,
        reuse: &Reuse<'_>,
        options: Options,
    ) -> Result<Self> {
        let duties = table.share.duties(rank, Grain::Page)?;
        let messages = duties.boxes.iter().flat_map(|message| &message.items);
        duties.local.iter().chain(messages).try_for_each(|item| held.check(item))?;
        let taken = Taken { workspace: None, beside: Beside::new(&table.tensors, reuse)? };
        Ok(Self {
            table,
            duties,
            held,
            groups: reuse.groups.to_vec(),
            shard_size: reuse.shard_size,
            frozen: reuse.frozen.to_vec(),
            options,
            base: OnceLock::new(),
            taken: Mutex::new(taken),
        })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn reuse(&self) -> Reuse<'_> {
        Reuse { base: None, frozen: &self.frozen, groups: &self.groups, shard_size: self.shard_size }
    }

    fn base(&self) -> Result<&Base> {
        self.base.get().ok_or(Error::Misused(ORDER))
    }

    fn set(&self, base: Base) -> Result<()> {
        self.base.set(base).map_err(|_| Error::Misused(ORDER))
    }

    /// For the coordinator: opens the base. Returns its manifest for the others, or `None` if it is not a base, which
    /// becomes a warning of the save.
    pub fn open(&self, path: &Path) -> Result<Option<Vec<u8>>> {
        let beside = &mut self.taken().beside;
        let Some(base) = beside.open(path, self.table.plan.block_size) else { return Ok(None) };
        let manifest = match base.manifest() {
            Ok(manifest) => manifest,
            Err(error) => {
                beside.warnings.push(format!("base: {error}: every tensor was written"));
                return Ok(None);
            }
        };
        self.set(Base::Opened(Box::new(base)))?;
        Ok(Some(manifest))
    }

    /// For all others: takes the manifest of the base at `path`.
    pub fn know(&self, path: &Path, manifest: Vec<u8>) -> Result<()> {
        self.set(Base::Told(Box::new(decode::decode(manifest, path)?)))
    }

    /// Sums what this rank has of the base's tensors.
    pub fn compare(&self, tick: Tick<'_>) -> Result<Sums> {
        sums(&self.table, &self.duties, &self.held, self.base()?.body(), &self.options, tick)
    }

    /// For the coordinator: makes the workspace for a save to `path`, and takes over what has not changed, by what all
    /// ranks found. Returns what the others need to know of it. Whatever is wrong with the base is a warning: then more
    /// is written.
    pub fn take(&self, path: &Path, overwrite: bool, found: &Sums, tick: Tick<'_>) -> Result<Vec<u8>> {
        let Base::Opened(base) = self.base()? else { return Err(Error::Misused(ORDER)) };
        let tensors = &self.table.tensors;
        let same = found.unchanged(tensors, base.body());
        let workspace = Workspace::create(path, overwrite)?;
        let taken = &mut *self.taken();
        let all = (&**base, &*same);
        taken.beside.take_over(&workspace, tensors, &self.reuse(), all, &self.options, tick)?;
        taken.workspace = Some(workspace);
        Ok(encode(&taken.beside))
    }

    /// For all others: notes what [`Self::take`] returned.
    pub fn follow(&self, told: &[u8]) -> Result<()> {
        let told = decode(told, self.table.tensors.len())?;
        self.taken().beside.follow(&self.table.tensors, &self.reuse(), self.base()?.body(), told)
    }

    /// The layout of what is left.
    pub fn table(&self) -> Result<Arc<Table>> {
        let beside = &self.taken().beside;
        if !beside.is_apart() {
            return Ok(Arc::clone(&self.table));
        }
        self.table.apart(&self.groups, self.shard_size, &beside.apart()).map(Arc::new)
    }

    /// Removes the workspace, unless it was given to a save.
    pub fn close(&self) {
        self.taken().workspace = None;
    }

    /// Gives what was taken over to the save of this rank.
    pub(super) fn give(&self) -> Taken {
        std::mem::take(&mut *self.taken())
    }
}

/// What the others need to know: the numbers of the files that were taken over, and a bit for each tensor that is expected
/// to stay as it is.
fn encode(beside: &Beside) -> Vec<u8> {
    let mut all = (beside.numbers.len() as u32).to_le_bytes().to_vec();
    beside.numbers.iter().for_each(|&number| all.extend((number as u32).to_le_bytes()));
    let bits = |some: &[bool]| (0..).zip(some).fold(0, |bits, (at, &still)| bits | u8::from(still) << at);
    all.extend(beside.still.chunks(8).map(bits));
    all
}

/// What [`encode`] made, in a save of so many tensors.
fn decode(mut bytes: &[u8], tensors: usize) -> Result<(Vec<bool>, Vec<usize>)> {
    let count = u32::from_le_bytes(next(&mut bytes)?);
    let numbers = (0..count).map(|_| Ok(u32::from_le_bytes(next(&mut bytes)?) as usize));
    let numbers = numbers.collect::<Result<_>>()?;
    if bytes.len() != tensors.div_ceil(8) {
        return Err(Error::Invalid("what the coordinator says of the base is of another state".to_owned()));
    }
    Ok(((0..tensors).map(|tensor| bytes[tensor / 8] >> (tensor % 8) & 1 == 1).collect(), numbers))
}

#[cfg(test)]
mod tests;
