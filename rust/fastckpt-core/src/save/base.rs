//! What a save takes over from an earlier checkpoint, its base: files in which nothing has changed are linked instead of
//! written (`docs/design.md`, Unchanged tensors).

use std::os::fd::AsFd as _;
use std::path::Path;

use rustix::fs::{self, AtFlags};

use super::compare::{counterparts, unchanged};
use crate::commit::Workspace;
use crate::engine::content::Content;
use crate::engine::job::Tick;
use crate::engine::options::Options;
use crate::engine::report::Linked;
use crate::error::{Error, Result, Visible};
use crate::format::checksum;
use crate::format::families::{Apart, Taken};
use crate::format::groups::Group;
use crate::format::layout::{Plan, TensorSpec};
use crate::format::manifest::{Body, ShardEntry, TensorEntry, Vouched};
use crate::read::Checkpoint;
use crate::sys::file::{changed, open_regular, sync};
use crate::sys::fork::Held;

/// The bytes of a linked file are read about once in this many saves. In between, its inode and its time of modification
/// stand for them.
const TRUSTED: u64 = 16;
/// What is unchanged gets files of its own where it is at least this part of what is written of its group.
const FEW: u64 = 16;

/// What a save may take over, and what it keeps apart so that the next one can.
#[derive(Debug, Clone, Copy)]
pub struct Reuse<'a> {
    /// An earlier checkpoint.
    pub base: Option<&'a Path>,
    /// For each tensor, whether it is said to stay as it is. Empty if nothing is said.
    pub frozen: &'a [bool],
    /// The groups and the shard size, as for a save that takes over nothing.
    pub groups: &'a [Group],
    /// The size of a shard in bytes.
    pub shard_size: u64,
}

/// A state, and where its bytes lie.
pub(super) type State<'a> = (&'a [TensorSpec], &'a [Content]);

/// What a save keeps apart, and what it has taken over. The files it took over lie in its workspace, under the names that
/// [`provisional`] gives them.
#[derive(Debug, Default)]
pub(crate) struct Beside {
    /// For each tensor, whether it is expected to stay as it is.
    pub(crate) still: Vec<bool>,
    /// The shards that were taken over, and for each its number and its entry in the base's manifest.
    pub(crate) taken: Vec<Taken>,
    pub(crate) numbers: Vec<usize>,
    pub(super) entries: Vec<ShardEntry>,
    vouched: Vec<Vouched>,
    /// For each tensor that lies in one of them, its entry in the base's manifest.
    pub(super) tensors: Vec<Option<TensorEntry>>,
    /// Why not everything that is unchanged could be taken over.
    pub(crate) warnings: Vec<String>,
}

/// The name of shard `number` of those that were taken over, until the layout is known.
fn provisional(number: usize) -> String {
    format!(".fastckpt-linked-{number}")
}

impl Beside {
    /// Nothing is taken over yet, and what is said to stay as it is is expected to.
    pub(crate) fn new(tensors: &[TensorSpec], reuse: &Reuse<'_>) -> Result<Self> {
        if !reuse.frozen.is_empty() && reuse.frozen.len() != tensors.len() {
            return Err(Error::Invalid("there must be one flag for each tensor, or none".to_owned()));
        }
        let still = if reuse.frozen.is_empty() { vec![false; tensors.len()] } else { reuse.frozen.to_vec() };
        Ok(Self { still, tensors: vec![None; tensors.len()], ..Self::default() })
    }

    /// Whether the layout is another one than that of a save that reuses nothing.
    pub(crate) fn is_apart(&self) -> bool {
        !self.taken.is_empty() || self.still.contains(&true)
    }

    /// What the layout keeps apart.
    pub(crate) fn apart(&self) -> Apart<'_> {
        Apart { still: &self.still, taken: &self.taken }
    }

    /// The files that were linked, and the bytes of tensors in them.
    pub(crate) fn linked(&self) -> Linked {
        let bytes = self.entries.iter().map(|shard| shard.bytes - shard.data_offset).sum();
        Linked { files: self.entries.len(), bytes }
    }

    /// Gives what was taken over the names that it has in a plan.
    pub(crate) fn settle(workspace: &Workspace, plan: &Plan) -> Result<()> {
        let mut shards = plan.shards.iter();
        shards.try_for_each(|shard| {
            shard.taken.map_or(Ok(()), |number| workspace.settle(&provisional(number), &shard.file))
        })
    }

    /// Compares a state with its base, and takes over what it can. Whatever is wrong with the base is a warning: then more
    /// is written.
    pub(super) fn find(
        workspace: &Workspace,
        state: State<'_>,
        reuse: &Reuse<'_>,
        block_size: u64,
        options: &Options,
        tick: Tick<'_>,
    ) -> Result<Self> {
        let (tensors, contents) = state;
        let mut beside = Self::new(tensors, reuse)?;
        let Some(path) = reuse.base else { return Ok(beside) };
        if let Some(base) = beside.open(path, block_size) {
            let same = unchanged(tensors, contents, base.body(), options, &mut *tick)?;
            beside.take_over(workspace, tensors, reuse, (&base, &same), options, tick)?;
        }
        Ok(beside)
    }

    /// Opens a base, unless it is none, which is a warning.
    pub(crate) fn open(&mut self, path: &Path, block_size: u64) -> Option<Checkpoint> {
        let why = match open(path, block_size) {
            Ok(base) => return Some(base),
            Err(why) => why,
        };
        self.warnings.push(format!("base: {why}: every tensor was written"));
        None
    }

    /// Takes over what it can, given for each tensor its number in the base if it is unchanged.
    pub(crate) fn take_over(
        &mut self,
        workspace: &Workspace,
        tensors: &[TensorSpec],
        reuse: &Reuse<'_>,
        (base, same): (&Checkpoint, &[Option<usize>]),
        options: &Options,
        tick: Tick<'_>,
    ) -> Result<()> {
        for (still, same) in self.still.iter_mut().zip(same) {
            *still |= same.is_some();
        }
        let mut refused = Vec::new();
        for (index, taken) in candidates(base.body(), same, tensors, reuse) {
            match take(workspace, base, index, self.taken.len(), options, &mut *tick) {
                Ok(vouched) => {
                    let of_base = |tensor: usize| Some(base.body().tensors[same[tensor]?].clone());
                    for placement in &taken.placements {
                        self.tensors[placement.tensor] = of_base(placement.tensor);
                    }
                    self.taken.push(taken);
                    self.numbers.push(index);
                    self.entries.push(base.body().shards[index].clone());
                    self.vouched.push(vouched);
                }
                Err(error @ (Error::Interrupted | Error::Panic(_))) => return Err(error),
                Err(error) => refused.push(error.to_string()),
            }
        }
        self.leave_a_few(tensors, reuse);
        if let Some(first) = refused.first() {
            let more =
                if refused.len() > 1 { format!(" (and {} more)", refused.len() - 1) } else { String::new() };
            self.warnings.push(format!("base: {first}{more}: what it holds was written again"));
        }
        Ok(())
    }

    /// Notes what another process has taken over from a base with this manifest, and what it keeps apart beside that.
    /// Refuses shards that are not of this state.
    pub(crate) fn follow(
        &mut self,
        tensors: &[TensorSpec],
        reuse: &Reuse<'_>,
        base: &Body,
        (still, numbers): (Vec<bool>, Vec<usize>),
    ) -> Result<()> {
        let mut same = vec![None; tensors.len()];
        for (tensor, index) in counterparts(tensors, base) {
            same[tensor] = Some(index);
        }
        let mut whole = shards_of(base, &same, tensors, reuse).into_iter();
        for number in &numbers {
            let taken = whole.find(|(index, _)| index == number).map(|(_, taken)| taken);
            let unknown = || Error::Invalid("a rank took over a file that is not of this state".to_owned());
            self.taken.push(taken.ok_or_else(unknown)?);
        }
        (self.still, self.numbers) = (still, numbers);
        Ok(())
    }

    /// What stands for the bytes of each shard of a plan, which lies in the workspace. Nothing, if a file cannot be looked
    /// at: then all are read before they are linked.
    pub(crate) fn vouched(&self, workspace: &Workspace, plan: &Plan) -> Vec<Vouched> {
        let written = |file: &str| {
            let (modified, inode) = changed(workspace.directory(), file).ok()?;
            Some(Vouched { modified, links: 0, inode })
        };
        let all = plan.shards.iter().map(|shard| {
            shard.taken.map_or_else(|| written(&shard.file), |number| Some(self.vouched[number]))
        });
        all.collect::<Option<_>>().unwrap_or_default()
    }

    /// Keeps nothing apart in a group of which nearly all is written anyway: a file for a few constants would only be one
    /// more file.
    fn leave_a_few(&mut self, tensors: &[TensorSpec], reuse: &Reuse<'_>) {
        let groups: Vec<_> = tensors.iter().map(|tensor| group_of(reuse, tensor)).collect();
        let mut bytes = vec![[0; 2]; reuse.groups.len()];
        let written = |beside: &Self, tensor: usize| beside.tensors[tensor].is_none();
        for (tensor, group) in groups.iter().enumerate().filter(|(tensor, _)| written(self, *tensor)) {
            let [all, still] = &mut bytes[*group];
            let size = tensors[tensor].bytes().unwrap_or(0);
            *all += size;
            *still += if self.still[tensor] { size } else { 0 };
        }
        for (tensor, group) in groups.iter().enumerate() {
            let [all, still] = bytes[*group];
            let frozen = reuse.frozen.get(tensor).copied().unwrap_or(false);
            if !frozen && still < all / FEW {
                self.still[tensor] = false;
            }
        }
    }
}

/// The group of a tensor.
fn group_of(reuse: &Reuse<'_>, tensor: &TensorSpec) -> usize {
    reuse.groups.iter().position(|group| group.holds(&tensor.name)).unwrap_or(0)
}

/// Opens a base. A text says why it is none.
fn open(path: &Path, block_size: u64) -> std::result::Result<Checkpoint, String> {
    let base = Checkpoint::open(path).map_err(|error| error.to_string())?;
    let (body, path) = (base.body(), path.display());
    if body.block_size != block_size {
        return Err(format!(
            "`{}` has blocks of {} bytes, not {block_size}",
            Visible(&path),
            body.block_size
        ));
    }
    if !body.tensors.is_empty() && body.tensors.iter().all(|tensor| tensor.crc64xz.is_empty()) {
        return Err(format!("`{}` has no second checksums (an older release wrote it)", Visible(&path)));
    }
    Ok(base)
}

/// The shards of a base that hold nothing but tensors of this state, unchanged, and go to one group of it. `same` has
/// for each tensor of the state its number in the base.
fn shards_of(
    base: &Body,
    same: &[Option<usize>],
    tensors: &[TensorSpec],
    reuse: &Reuse<'_>,
) -> Vec<(usize, Taken)> {
    let mut own = vec![None; base.tensors.len()];
    for (tensor, index) in same.iter().enumerate() {
        if let Some(index) = *index {
            own[index] = Some(tensor);
        }
    }
    let group_of = |tensor: usize| group_of(reuse, &tensors[tensor]);
    let mut placements: Vec<Option<Vec<_>>> = base.shards.iter().map(|_| Some(Vec::new())).collect();
    for (entry, own) in base.tensors.iter().zip(&own) {
        let shard = &mut placements[entry.shard];
        match own {
            Some(tensor) => shard.iter_mut().for_each(|all| all.push(entry.placement(*tensor))),
            None => *shard = None,
        }
    }
    let whole = placements.into_iter().enumerate().filter_map(|(index, placements)| {
        let mut placements = placements?;
        placements.sort_unstable_by_key(|placement| (placement.offset, placement.bytes));
        let group = group_of(placements.first()?.tensor);
        let shard = &base.shards[index];
        let fits = reuse.groups[group].prefix == shard.prefix
            && placements.iter().all(|placement| group_of(placement.tensor) == group);
        fits.then_some((index, Taken { group, placements, bytes: shard.bytes }))
    });
    whole.collect()
}

/// Those of them that are worth linking.
fn candidates(
    base: &Body,
    same: &[Option<usize>],
    tensors: &[TensorSpec],
    reuse: &Reuse<'_>,
) -> Vec<(usize, Taken)> {
    let whole = shards_of(base, same, tensors, reuse);
    let group_of = |tensor: usize| group_of(reuse, &tensors[tensor]);
    let mut still = vec![0; reuse.groups.len()];
    for (tensor, _) in same.iter().enumerate().filter(|(_, same)| same.is_some()) {
        still[group_of(tensor)] += tensors[tensor].bytes().unwrap_or(0);
    }
    for (index, taken) in &whole {
        let data = base.shards[*index].bytes.saturating_sub(base.shards[*index].data_offset);
        still[taken.group] = still[taken.group].saturating_sub(data);
    }
    worth_linking(whole, still, reuse.shard_size)
}

/// Leaves out small shards that are no larger than what is written in their group because it stays as it is, `still`
/// bytes: they become one with it. So the shards that are linked double in size, and their number stays small however
/// tensors come to rest one by one.
fn worth_linking(whole: Vec<(usize, Taken)>, mut still: Vec<u64>, shard_size: u64) -> Vec<(usize, Taken)> {
    let mut order: Vec<usize> = (0..whole.len()).collect();
    order.sort_by_key(|&number| whole[number].1.bytes);
    let mut kept = vec![true; whole.len()];
    for number in order {
        let Taken { group, bytes, .. } = whole[number].1;
        if bytes <= still[group] && bytes < shard_size / 2 {
            still[group] += bytes;
            kept[number] = false;
        }
    }
    whole.into_iter().zip(kept).filter_map(|(one, kept)| kept.then_some(one)).collect()
}

/// Takes shard `index` of the base over into the workspace, after a look at its bytes or at what stands for them. Returns
/// what stands for them from now on.
fn take(
    workspace: &Workspace,
    base: &Checkpoint,
    index: usize,
    number: usize,
    options: &Options,
    tick: Tick<'_>,
) -> Result<Vouched> {
    let shard = &base.body().shards[index];
    let path = base.path().join(&shard.file);
    let (open, bytes) =
        open_regular(base.directory(), &shard.file).map_err(Error::io("open the base's file", &path))?;
    if bytes != shard.bytes {
        return Err(Error::corrupt(&path, format!("it has {bytes} bytes, written were {}", shard.bytes)));
    }
    let open = Held::from(open);
    let look = || changed(open.as_fd(), "").map_err(Error::io("look at", &path));
    let before = look()?;
    let is_known = |vouched: &&Vouched| (vouched.modified, vouched.inode) == before;
    let vouched = base.body().saved.files.get(index).filter(is_known);
    if vouched.is_none_or(|vouched| is_due(shard, vouched.links)) {
        // What is read is no progress of the save.
        base.check_shard(index, options, &mut |_, _| tick(0, 0))?;
    }
    if vouched.is_none() {
        // Whoever made it may not have synced it: it may be a copy that a user made. After the link, the sync would wait
        // for the file system to write that, too.
        sync(open.as_fd()).map_err(Error::io("sync the base's file", &path))?;
    }
    let name = provisional(number);
    workspace.link((base.directory(), base.path()), (&shard.file, open.as_fd()), &name)?;
    if look()?.0 != before.0 {
        workspace.unlink(&name);
        return Err(Error::corrupt(&path, "it was changed while it was linked"));
    }
    // A clone is another file than the base's.
    let inode =
        fs::statat(workspace.directory(), &name, AtFlags::SYMLINK_NOFOLLOW).map_or(0, |stat| stat.st_ino);
    let links = base.body().saved.files.get(index).map_or(0, |vouched| vouched.links);
    Ok(Vouched { modified: before.0, links: links.saturating_add(1), inode })
}

/// Whether it is the turn of a shard to be read. Shards take turns by their checksums, so that not all of them are read
/// in the same save.
fn is_due(shard: &ShardEntry, links: u64) -> bool {
    let turn = checksum::from_hex(shard.crc.as_bytes()).unwrap_or(0);
    links % TRUSTED == turn % TRUSTED
}

#[cfg(test)]
mod tests;
