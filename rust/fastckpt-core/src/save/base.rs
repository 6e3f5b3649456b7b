//! What a save reuses of an earlier checkpoint, its base: files in which nothing has changed are linked instead of
//! written (`docs/design.md`, Unchanged tensors).

use std::os::fd::AsFd as _;
use std::path::Path;

use super::compare::{counterparts, unchanged};
use crate::commit::Workspace;
use crate::engine::content::Content;
use crate::engine::job::Progress;
use crate::engine::options::Options;
use crate::engine::report::Linked;
use crate::error::{Error, Result, Visible};
use crate::format::checksum;
use crate::format::families::{LinkedShard, Reuse};
use crate::format::groups::Group;
use crate::format::layout::{Plan, Shard, TensorSpec};
use crate::format::manifest::{Body, ShardEntry, TensorEntry, Vouched};
use crate::read::Checkpoint;
use crate::sys::file::{changed, open_regular, sync};
use crate::sys::fork::Held;
use crate::sys::fs::{self, AtFlags};

/// The bytes of a linked file are read about once in this many saves, because a disk can lose bytes without a write. In
/// between, the save relies on the file's inode and modification time.
const TRUSTED: u64 = 16;
/// Unchanged tensors get separate files if they make up at least 1/`FEW` of the bytes that are written of their group.
const FEW: u64 = 16;

/// A state that is saved with a base, and the inputs of its layout without a base.
#[derive(Debug, Clone, Copy)]
pub(crate) struct State<'a> {
    pub(crate) tensors: &'a [TensorSpec],
    pub(crate) groups: &'a [Group],
    /// Bytes of a shard.
    pub(crate) shard_size: u64,
    /// For each tensor, whether it is declared unchanging. Empty if nothing is declared.
    pub(crate) frozen: &'a [bool],
}

impl State<'_> {
    /// The group of a tensor.
    fn group_of(&self, tensor: usize) -> usize {
        self.groups.iter().position(|group| group.holds(&self.tensors[tensor].name)).unwrap_or(0)
    }

    fn is_frozen(&self, tensor: usize) -> bool {
        self.frozen.get(tensor).copied().unwrap_or(false)
    }

    fn bytes_of(&self, tensor: usize) -> u64 {
        self.tensors[tensor].bytes().unwrap_or(0)
    }
}

/// The shards of a base that a save links. They are in the save's workspace. Until the layout is known, they have the
/// names that [`provisional`] returns.
#[derive(Debug, Default)]
pub(crate) struct LinkedShards {
    /// For each tensor, whether it is expected to stay unchanged.
    pub(crate) unchanged: Vec<bool>,
    /// The linked shards, and the number and the entry of each in the base's manifest.
    pub(crate) shards: Vec<LinkedShard>,
    pub(crate) numbers: Vec<usize>,
    entries: Vec<ShardEntry>,
    vouched: Vec<Vouched>,
    /// For each tensor in a linked shard, its entry in the base's manifest.
    tensors: Vec<Option<TensorEntry>>,
    /// Why some unchanged tensors could not be linked.
    pub(crate) warnings: Vec<String>,
}

/// The name of linked shard `number`, until the layout is known.
fn provisional(number: usize) -> String {
    format!(".fastckpt-linked-{number}")
}

impl LinkedShards {
    /// An empty list of linked shards. Frozen tensors are expected to stay unchanged.
    pub(crate) fn new(state: &State<'_>) -> Self {
        let tensors = 0..state.tensors.len();
        let unchanged = tensors.clone().map(|tensor| state.is_frozen(tensor)).collect();
        Self { unchanged, tensors: tensors.map(|_| None).collect(), ..Self::default() }
    }

    /// Whether the layout differs from that of a save that links nothing.
    pub(crate) fn changes_layout(&self, state: &State<'_>) -> bool {
        let mut flags = self.unchanged.iter().enumerate();
        !self.shards.is_empty() || flags.any(|(tensor, &unchanged)| unchanged != state.is_frozen(tensor))
    }

    /// The inputs of the layout.
    pub(crate) fn reuse(&self) -> Reuse<'_> {
        Reuse { unchanged: &self.unchanged, linked: &self.shards }
    }

    /// The number of linked files, and the number of bytes of tensors in them.
    pub(crate) fn linked(&self) -> Linked {
        let bytes = self.entries.iter().map(|shard| shard.bytes - shard.data_offset).sum();
        Linked { files: self.entries.len(), bytes }
    }

    /// Gives the linked files their names in a plan.
    pub(crate) fn name_linked_shards(workspace: &Workspace, plan: &Plan) -> Result<()> {
        let mut shards = plan.shards.iter();
        shards.try_for_each(|shard| {
            shard.linked.map_or(Ok(()), |number| workspace.settle(&provisional(number), &shard.file))
        })
    }

    /// Compares a state with its base, and links the files that can be linked. Problems with the base become warnings,
    /// and more is written.
    pub(super) fn find(
        workspace: &Workspace,
        (state, contents): (&State<'_>, &[Content]),
        path: &Path,
        block_size: u64,
        options: &Options,
        progress: Progress<'_>,
    ) -> Result<Self> {
        let mut linked = Self::new(state);
        if let Some(base) = linked.open(path, block_size) {
            let same = unchanged(state.tensors, contents, base.body(), options, &mut *progress)?;
            linked.link(workspace, state, (&base, &same), options, progress)?;
        }
        Ok(linked)
    }

    /// Opens a base. If there is no usable base at the path, adds a warning.
    pub(crate) fn open(&mut self, path: &Path, block_size: u64) -> Option<Checkpoint> {
        let why = match open(path, block_size) {
            Ok(base) => return Some(base),
            Err(why) => why,
        };
        self.warnings.push(format!("base: {why}: every tensor was written"));
        None
    }

    /// Links the files that can be linked. `same` has for each tensor its number in the base if it is unchanged.
    pub(crate) fn link(
        &mut self,
        workspace: &Workspace,
        state: &State<'_>,
        (base, same): (&Checkpoint, &[Option<usize>]),
        options: &Options,
        progress: Progress<'_>,
    ) -> Result<()> {
        for (unchanged, same) in self.unchanged.iter_mut().zip(same) {
            *unchanged |= same.is_some();
        }
        let mut refused = Vec::new();
        for (index, shard) in candidates(base.body(), same, state) {
            match link(workspace, base, index, self.shards.len(), options, &mut *progress) {
                Ok(vouched) => {
                    let of_base = |tensor: usize| Some(base.body().tensors[same[tensor]?].clone());
                    for placement in &shard.placements {
                        self.tensors[placement.tensor] = of_base(placement.tensor);
                    }
                    self.shards.push(shard);
                    self.numbers.push(index);
                    self.entries.push(base.body().shards[index].clone());
                    self.vouched.push(vouched);
                }
                Err(error @ (Error::Interrupted | Error::Panic(_))) => return Err(error),
                Err(error) => refused.push(error.to_string()),
            }
        }
        self.leave_a_few(state);
        if let Some(first) = refused.first() {
            let more =
                if refused.len() > 1 { format!(" (and {} more)", refused.len() - 1) } else { String::new() };
            self.warnings.push(format!("base: {first}{more}: its tensors were written again"));
        }
        Ok(())
    }

    /// Records the files that another process has linked from a base with this manifest, and the tensors that it
    /// expects to stay unchanged. Refuses shards that do not belong to this state.
    pub(crate) fn follow(
        &mut self,
        state: &State<'_>,
        base: &Body,
        (unchanged, numbers): (Vec<bool>, Vec<usize>),
    ) -> Result<()> {
        let mut same = vec![None; state.tensors.len()];
        for (tensor, index) in counterparts(state.tensors, base) {
            same[tensor] = Some(index);
        }
        let mut whole = shards_of(base, &same, state).into_iter();
        for number in &numbers {
            let shard = whole.find(|(index, _)| index == number).map(|(_, shard)| shard);
            let unknown = || Error::Invalid("a rank linked a file of another state".to_owned());
            self.shards.push(shard.ok_or_else(unknown)?);
        }
        (self.unchanged, self.numbers) = (unchanged, numbers);
        Ok(())
    }

    /// The entries of all shards and tensors of a plan: from the base for linked ones, and as `written` for the others.
    pub(super) fn united(
        &self,
        plan: &Plan,
        (shards, tensors): (Vec<ShardEntry>, Vec<TensorEntry>),
    ) -> (Vec<ShardEntry>, Vec<TensorEntry>) {
        let (mut shards, mut tensors) = (shards.into_iter(), tensors.into_iter());
        let shard = |shard: &Shard| match shard.linked {
            Some(number) => Some(ShardEntry { file: shard.file.clone(), ..self.entries[number].clone() }),
            None => shards.next(),
        };
        let tensor = |(index, &(shard, _)): (usize, &(usize, u64))| match plan.shards[shard].linked {
            Some(_) => self.tensors[index].clone().map(|entry| entry.in_shard(shard)),
            None => tensors.next(),
        };
        let all = plan.shards.iter().filter_map(shard).collect();
        (all, plan.places.iter().enumerate().filter_map(tensor).collect())
    }

    /// The facts by which a later save trusts the bytes of each shard of a plan in the workspace. Empty if a file
    /// cannot be examined: in that case, the next save reads all shards before it links them.
    pub(crate) fn vouched(&self, workspace: &Workspace, plan: &Plan) -> Vec<Vouched> {
        let written = |file: &str| {
            let (modified, inode) = changed(workspace.directory(), file).ok()?;
            Some(Vouched { modified, links: 0, inode })
        };
        let all = plan.shards.iter().map(|shard| {
            shard.linked.map_or_else(|| written(&shard.file), |number| Some(self.vouched[number]))
        });
        all.collect::<Option<_>>().unwrap_or_default()
    }

    /// Separates no tensors in a group that is rewritten almost completely: a file for a few constants would only add a
    /// file.
    fn leave_a_few(&mut self, state: &State<'_>) {
        let groups: Vec<_> = (0..state.tensors.len()).map(|tensor| state.group_of(tensor)).collect();
        let mut bytes = vec![[0; 2]; state.groups.len()];
        for (tensor, group) in groups.iter().enumerate().filter(|(tensor, _)| self.tensors[*tensor].is_none())
        {
            let [all, unchanged] = &mut bytes[*group];
            *all += state.bytes_of(tensor);
            *unchanged += if self.unchanged[tensor] { state.bytes_of(tensor) } else { 0 };
        }
        for (tensor, group) in groups.iter().enumerate() {
            let [all, unchanged] = bytes[*group];
            if !state.is_frozen(tensor) && unchanged < all / FEW {
                self.unchanged[tensor] = false;
            }
        }
    }
}

/// Opens a base, or returns why it cannot be one.
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
    if !body.tensors.is_empty() && body.tensors.iter().all(|tensor| tensor.crc64xz().is_empty()) {
        return Err(format!("`{}` has no second checksums (an older release wrote it)", Visible(&path)));
    }
    Ok(base)
}

/// The shards of a base whose tensors are all in this state, unchanged, and all in the same group of it. `same` has for
/// each tensor of the state its number in the base.
fn shards_of(base: &Body, same: &[Option<usize>], state: &State<'_>) -> Vec<(usize, LinkedShard)> {
    let mut own = vec![None; base.tensors.len()];
    for (tensor, index) in same.iter().enumerate() {
        if let Some(index) = *index {
            own[index] = Some(tensor);
        }
    }
    let mut placements: Vec<Option<Vec<_>>> = base.shards.iter().map(|_| Some(Vec::new())).collect();
    for (entry, own) in base.tensors.iter().zip(&own) {
        let shard = &mut placements[entry.shard()];
        match own {
            Some(tensor) => shard.iter_mut().for_each(|all| all.push(entry.placement(*tensor))),
            None => *shard = None,
        }
    }
    let whole = placements.into_iter().enumerate().filter_map(|(index, placements)| {
        let mut placements = placements?;
        placements.sort_unstable_by_key(|placement| (placement.offset, placement.bytes));
        let group = state.group_of(placements.first()?.tensor);
        let shard = &base.shards[index];
        let fits = state.groups[group].prefix == shard.prefix
            && placements.iter().all(|placement| state.group_of(placement.tensor) == group);
        fits.then_some((index, LinkedShard { group, placements, bytes: shard.bytes }))
    });
    whole.collect()
}

/// The shards of the base that are worth linking.
fn candidates(base: &Body, same: &[Option<usize>], state: &State<'_>) -> Vec<(usize, LinkedShard)> {
    let whole = shards_of(base, same, state);
    let mut unchanged = vec![0; state.groups.len()];
    for (tensor, _) in same.iter().enumerate().filter(|(_, same)| same.is_some()) {
        unchanged[state.group_of(tensor)] += state.bytes_of(tensor);
    }
    for (index, LinkedShard { group, .. }) in &whole {
        let data = base.shards[*index].bytes.saturating_sub(base.shards[*index].data_offset);
        unchanged[*group] = unchanged[*group].saturating_sub(data);
    }
    worth_linking(whole, unchanged, state.shard_size)
}

/// Leaves out small shards that are no larger than the unchanged tensors that are written in their group (`unchanged`
/// bytes): both together become one shard. So linked shards double in size, and their number stays small even if
/// tensors stop changing one by one.
fn worth_linking(
    whole: Vec<(usize, LinkedShard)>,
    mut unchanged: Vec<u64>,
    shard_size: u64,
) -> Vec<(usize, LinkedShard)> {
    let mut order: Vec<usize> = (0..whole.len()).collect();
    order.sort_by_key(|&number| whole[number].1.bytes);
    let mut kept = vec![true; whole.len()];
    for number in order {
        let LinkedShard { group, bytes, .. } = whole[number].1;
        if bytes <= unchanged[group] && bytes < shard_size / 2 {
            unchanged[group] += bytes;
            kept[number] = false;
        }
    }
    whole.into_iter().zip(kept).filter_map(|(one, kept)| kept.then_some(one)).collect()
}

/// Links shard `index` of the base into the workspace, after a check of its bytes or of the facts by which they are
/// trusted. Returns the facts by which later saves trust them.
fn link(
    workspace: &Workspace,
    base: &Checkpoint,
    index: usize,
    number: usize,
    options: &Options,
    progress: Progress<'_>,
) -> Result<Vouched> {
    let shard = &base.body().shards[index];
    let path = base.path().join(&shard.file);
    let directory = base.directory().ok_or(Error::Misused("a base must be in a directory"))?;
    let (open, bytes) =
        open_regular(directory, &shard.file).map_err(Error::io("open the base's file", &path))?;
    if bytes != shard.bytes {
        return Err(Error::corrupt(&path, format!("it has {bytes} bytes, expected {}", shard.bytes)));
    }
    let open = Held::from(open);
    let look = || changed(open.as_fd(), "").map_err(Error::io("look at", &path));
    let before = look()?;
    let is_known = |vouched: &&Vouched| (vouched.modified, vouched.inode) == before;
    let vouched = base.body().saved.files.get(index).filter(is_known);
    if vouched.is_none_or(|vouched| is_due(shard, vouched.links)) {
        // These reads do not count as progress of the save.
        base.check_shard(index, options, &mut |_, _| progress(0, 0))?;
    }
    if vouched.is_none() {
        // Another program may have created the file without a sync, for example when a user copied it. After the link,
        // the sync would wait until the file system has written the link, too.
        sync(open.as_fd()).map_err(Error::io("sync the base's file", &path))?;
    }
    let name = provisional(number);
    workspace.link((directory, base.path()), (&shard.file, open.as_fd()), &name)?;
    if look()?.0 != before.0 {
        workspace.unlink(&name);
        return Err(Error::corrupt(&path, "it was changed while it was linked"));
    }
    // A clone is a different file from the base's file.
    let inode =
        fs::statat(workspace.directory(), &name, AtFlags::SYMLINK_NOFOLLOW).map_or(0, |stat| stat.st_ino);
    let links = base.body().saved.files.get(index).map_or(0, |vouched| vouched.links);
    Ok(Vouched { modified: before.0, links: links.saturating_add(1), inode })
}

/// Whether a shard is due to be read. The turn of a shard depends on its checksum, so that not all shards are read in
/// the same save.
fn is_due(shard: &ShardEntry, links: u64) -> bool {
    let turn = checksum::from_hex(shard.crc.as_bytes()).unwrap_or(0);
    links % TRUSTED == turn % TRUSTED
}

#[cfg(test)]
mod tests;
