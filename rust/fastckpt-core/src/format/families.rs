//! The assignment of tensors to the shards of their group (`docs/format.md`, 2.1). Pure.

use crate::error::{Error, Result};
use crate::format::geometry::{PAGE, Placement};
use crate::format::groups::Group;
use crate::format::limits::MAX_HEADER;

/// A shard of another checkpoint that this checkpoint links unchanged.
#[derive(Debug, Clone)]
pub struct LinkedShard {
    /// The group of the shard.
    pub group: usize,
    /// The tensors in file order.
    pub placements: Vec<Placement>,
    /// Length of the file.
    pub bytes: u64,
}

/// The shards of another checkpoint that a save reuses, and the tensors that it groups for reuse by a later save.
#[derive(Debug, Clone, Copy, Default)]
pub struct Reuse<'a> {
    /// For each tensor, whether it is expected to stay unchanged. Such tensors have separate shards. Empty if no tensor
    /// is expected to.
    pub unchanged: &'a [bool],
    /// Shards of the other checkpoint. Their tensors are in no other shard.
    pub linked: &'a [LinkedShard],
}

/// A shard of a group.
pub(super) enum Member {
    /// A linked shard: its index in [`Reuse::linked`].
    Linked(usize),
    /// A shard with these tensors, in the order of their names.
    Tensors(Vec<usize>),
}

/// A shard that is being filled: its bytes, an upper bound for its header, and its tensors.
#[derive(Default)]
struct Filling {
    full: Vec<Member>,
    bytes: u64,
    header: u64,
    tensors: Vec<usize>,
}

impl Filling {
    /// Adds a tensor of `bytes`, to the next shard if this one would be too long.
    fn add(&mut self, tensor: usize, (bytes, entry): (u64, u64), shard_size: u64) {
        let full = self.bytes.saturating_add(bytes) > shard_size || self.header + entry > MAX_HEADER - PAGE;
        if full && !self.tensors.is_empty() {
            self.full.push(Member::Tensors(std::mem::take(&mut self.tensors)));
            (self.bytes, self.header) = (0, 0);
        }
        self.tensors.push(tensor);
        self.bytes += bytes;
        self.header += entry;
    }

    fn finish(mut self) -> Vec<Member> {
        if !self.tensors.is_empty() {
            self.full.push(Member::Tensors(self.tensors));
        }
        self.full
    }
}

/// The properties of a tensor that its shard depends on.
pub(super) struct Asked<'a> {
    pub(super) name: &'a str,
    /// The size of the tensor in bytes.
    pub(super) bytes: u64,
    /// An upper bound for the tensor's bytes in the header.
    pub(super) entry: u64,
}

/// The shards of each group, in order: linked shards, shards of unchanged tensors, other shards.
pub(super) fn of(
    tensors: &[Asked<'_>],
    groups: &[Group],
    shard_size: u64,
    reuse: &Reuse<'_>,
) -> Result<Vec<Vec<Member>>> {
    let mut elsewhere = vec![false; tensors.len()];
    for placement in reuse.linked.iter().flat_map(|shard| &shard.placements) {
        elsewhere[placement.tensor] = true;
    }
    let mut filling: Vec<[Filling; 2]> = groups.iter().map(|_| <[Filling; 2]>::default()).collect();
    for tensor in by_name(tensors)? {
        let Asked { name, bytes, entry } = tensors[tensor];
        let group = groups.iter().position(|group| group.holds(name));
        let group = group.ok_or_else(|| Error::Invalid(format!("the tensor name `{name}` is reserved")))?;
        if !elsewhere[tensor] {
            let moves = !reuse.unchanged.get(tensor).copied().unwrap_or(false);
            filling[group][usize::from(moves)].add(tensor, (bytes, entry), shard_size);
        }
    }
    let mut families: Vec<Vec<Member>> = groups.iter().map(|_| Vec::new()).collect();
    for (number, shard) in reuse.linked.iter().enumerate() {
        families[shard.group].push(Member::Linked(number));
    }
    for (family, filling) in families.iter_mut().zip(filling) {
        family.extend(filling.into_iter().flat_map(Filling::finish));
    }
    // The model has a file, even if it has no tensors.
    if let Some(first) = families.first_mut().filter(|first| first.is_empty()) {
        first.push(Member::Tensors(Vec::new()));
    }
    Ok(families)
}

/// The tensors in the order of their names. Two equal names are an error.
fn by_name(tensors: &[Asked<'_>]) -> Result<Vec<usize>> {
    let name = |tensor: &usize| tensors[*tensor].name;
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_unstable_by(|a, b| name(a).cmp(name(b)));
    match order.windows(2).find(|pair| name(&pair[0]) == name(&pair[1])) {
        Some(pair) => Err(Error::Invalid(format!("two tensors have the name `{}`", name(&pair[0])))),
        None => Ok(order),
    }
}
