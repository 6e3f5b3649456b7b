//! The boxes that ranks have of a tensor, for any shape. Pure.

use std::collections::HashMap;
use std::ops::Range;

use crate::error::Error;

/// The effect of one dimension of a mesh on a tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Placement {
    /// Every coordinate has the whole tensor.
    Replicate,
    /// The tensor's dimension is cut into one chunk for each coordinate, as `torch.chunk` does.
    Shard(usize),
    /// The dimension is cut into `factor` chunks, and each of them into one chunk for each coordinate.
    Strided {
        /// The dimension of the tensor.
        dim: usize,
        /// The number of chunks that are cut again.
        factor: u64,
    },
}

/// A box: a range of indices along each dimension of the logical shape.
pub type Bounds = Vec<Range<u64>>;

/// Which ranks have which boxes of a tensor. A rank has one part, or one part for each of its explicit boxes.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Spread {
    /// Every rank has the whole tensor.
    All,
    /// Each of these ranks has the whole tensor.
    Ranks(Vec<u32>),
    /// A mesh of ranks, in row-major order. Placements apply in the order of the dimensions of the mesh, each to what
    /// the earlier ones left. What remains at the end is the part, in order.
    Mesh {
        /// The ranks.
        ranks: Vec<u32>,
        /// The size of each dimension of the mesh.
        mesh: Vec<u64>,
        /// One placement for each dimension of the mesh.
        placements: Vec<Placement>,
    },
    /// Pairs of a rank and a box. The boxes of a rank are its parts, in this order.
    Boxes(Vec<(u32, Bounds)>),
}

/// Ranks that have the same indices of a tensor.
#[derive(Debug)]
struct Group {
    /// The ranks, ascending.
    ranks: Box<[u32]>,
    /// The index along each dimension of the mesh; for [`Spread::Boxes`], the index of the box.
    at: Vec<u64>,
}

/// A spread whose ranks are sorted into groups.
#[derive(Debug)]
pub(super) struct Groups {
    spread: Spread,
    all: Vec<Group>,
    /// The rank and the group of each part, sorted by rank. The parts of a rank are in order.
    parts: Vec<(u32, u32)>,
}

/// The groups of a spread, and the rank and group of each part; or why the spread is invalid.
type Grouped = Result<(Vec<Group>, Vec<(u32, u32)>), String>;

impl Groups {
    /// The groups of `spread` among ranks below `count`.
    pub(super) fn new(spread: Spread, count: u32) -> crate::error::Result<Self> {
        Self::grouped(&spread, count)
            .map(|(all, mut parts)| {
                parts.sort_by_key(|&(rank, _)| rank);
                Self { spread, all, parts }
            })
            .map_err(|why| Error::Invalid(format!("a spread of a tensor over {count} ranks: {why}")))
    }

    fn grouped(spread: &Spread, count: u32) -> Grouped {
        let all: Vec<u32>;
        let (ranks, keys): (&[u32], Vec<Vec<u64>>) = match spread {
            Spread::All => {
                all = (0..count).collect();
                (&all, vec![Vec::new(); all.len()])
            }
            Spread::Ranks(ranks) => (ranks, vec![Vec::new(); ranks.len()]),
            Spread::Mesh { ranks, mesh, placements } => (ranks, coordinates(ranks, mesh, placements)?),
            Spread::Boxes(boxes) => return boxed(boxes, count),
        };
        let mut sorted = ranks.to_vec();
        sorted.sort_unstable();
        if let Some([twice, _]) = sorted.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("rank {twice} is named twice"));
        }
        inside(sorted.last().copied(), count)?;
        let mut found: HashMap<Vec<u64>, u32> = HashMap::new();
        let (mut members, mut parts) = (Vec::<(Vec<u32>, Vec<u64>)>::new(), Vec::with_capacity(ranks.len()));
        for (&rank, key) in ranks.iter().zip(keys) {
            let group = *found.entry(key).or_insert_with_key(|key| {
                members.push((Vec::new(), key.clone()));
                members.len() as u32 - 1
            });
            members[group as usize].0.push(rank);
            parts.push((rank, group));
        }
        let group = |(mut ranks, at): (Vec<u32>, _)| {
            ranks.sort_unstable();
            Group { ranks: ranks.into(), at }
        };
        Ok((members.into_iter().map(group).collect(), parts))
    }

    /// The spread.
    pub(super) const fn spread(&self) -> &Spread {
        &self.spread
    }

    /// The number of groups.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// The ranks of all groups, ascending.
    pub(super) fn everybody(&self) -> Vec<u32> {
        let mut all: Vec<u32> = self.parts.iter().map(|&(rank, _)| rank).collect();
        all.dedup();
        all
    }

    /// The ranks of a group, ascending.
    pub(super) fn ranks(&self, group: u32) -> &[u32] {
        &self.all[group as usize].ranks
    }

    /// The group of each part of `rank`.
    pub(super) fn of(&self, rank: u32) -> impl ExactSizeIterator<Item = u32> {
        let first = self.parts.partition_point(|&(other, _)| other < rank);
        let len = self.parts[first..].partition_point(|&(other, _)| other == rank);
        self.parts[first..first + len].iter().map(|&(_, group)| group)
    }

    /// Whether each of the spread's ranks has the whole tensor.
    pub(super) fn is_whole(&self) -> bool {
        match &self.spread {
            Spread::All | Spread::Ranks(_) => true,
            Spread::Mesh { placements, .. } => placements.iter().all(|p| matches!(p, Placement::Replicate)),
            Spread::Boxes(_) => false,
        }
    }

    /// The part of a tensor that a group has: along each dimension, ascending ranges of indices, which are adjacent in
    /// the part. If it is empty, at least one dimension has no range. Replaces the contents of `dims`.
    pub(super) fn ranges(&self, group: u32, shape: &[u64], dims: &mut Vec<Bounds>) -> Result<(), String> {
        let at = &self.all[group as usize].at;
        dims.resize_with(shape.len(), Bounds::new);
        for (along, &size) in dims.iter_mut().zip(shape) {
            along.clear();
            along.push(0..size);
        }
        match &self.spread {
            Spread::All | Spread::Ranks(_) => {}
            Spread::Mesh { mesh, placements, .. } => {
                for ((&placement, &count), &index) in placements.iter().zip(mesh).zip(at) {
                    let (Placement::Shard(dim) | Placement::Strided { dim, .. }) = placement else {
                        continue;
                    };
                    let Some(along) = dims.get_mut(dim) else {
                        return Err(format!(
                            "it is sharded along dimension {dim}, but has {} dimensions",
                            shape.len()
                        ));
                    };
                    match placement {
                        Placement::Strided { factor, .. } => *along = strided(along, factor, count, index),
                        _ => chunk(along, count, index),
                    }
                }
            }
            Spread::Boxes(boxes) => {
                let bounds = &boxes[at[0] as usize].1;
                if bounds.len() != shape.len() {
                    return Err(format!(
                        "a box has {} dimensions, the tensor has {}",
                        bounds.len(),
                        shape.len()
                    ));
                }
                for (dim, (range, &size)) in bounds.iter().zip(shape).enumerate() {
                    if range.start > range.end || range.end > size {
                        return Err(format!("{range:?} is not in dimension {dim} of size {size}"));
                    }
                    dims[dim][0] = range.clone();
                }
            }
        }
        for along in dims {
            along.retain(|range| !range.is_empty());
        }
        Ok(())
    }
}

/// The index of each rank along each dimension of the mesh. It is 0 along dimensions that replicate, because ranks that
/// differ only there are in one group.
fn coordinates(ranks: &[u32], mesh: &[u64], placements: &[Placement]) -> Result<Vec<Vec<u64>>, String> {
    let size = mesh.iter().try_fold(1u64, |all, &size| all.checked_mul(size));
    if size != Some(ranks.len() as u64) || placements.len() != mesh.len() {
        return Err(format!(
            "a mesh of {mesh:?} with {} placements does not fit {} ranks",
            placements.len(),
            ranks.len()
        ));
    }
    if placements.iter().any(|placement| matches!(placement, Placement::Strided { factor: 0, .. })) {
        return Err("a strided placement has no chunks".to_owned());
    }
    let index = |mut flat: u64| {
        let mut at = vec![0; mesh.len()];
        for (dim, &size) in mesh.iter().enumerate().rev() {
            if !matches!(placements[dim], Placement::Replicate) {
                at[dim] = flat % size;
            }
            flat /= size;
        }
        at
    };
    Ok((0..ranks.len() as u64).map(index).collect())
}

/// Puts ranks with the same explicit box into one group.
fn boxed(boxes: &[(u32, Bounds)], count: u32) -> Grouped {
    inside(boxes.iter().map(|&(rank, _)| rank).max(), count)?;
    // A rank that names a box twice has two parts, which must be in two groups: the number tells them apart.
    let (mut times, mut found) = (HashMap::<(u32, &Bounds), u32>::new(), HashMap::new());
    let (mut members, mut parts) = (Vec::<(Vec<u32>, u64)>::new(), Vec::with_capacity(boxes.len()));
    for (index, (rank, bounds)) in boxes.iter().enumerate() {
        let time = times.entry((*rank, bounds)).or_default();
        let group = *found.entry((bounds, *time)).or_insert_with(|| {
            members.push((Vec::new(), index as u64));
            members.len() as u32 - 1
        });
        *time += 1;
        members[group as usize].0.push(*rank);
        parts.push((*rank, group));
    }
    let group = |(mut ranks, index): (Vec<u32>, _)| {
        ranks.sort_unstable();
        Group { ranks: ranks.into(), at: vec![index] }
    };
    Ok((members.into_iter().map(group).collect(), parts))
}

fn inside(highest: Option<u32>, count: u32) -> Result<(), String> {
    match highest {
        Some(rank) if rank >= count => Err(format!("there is no rank {rank}")),
        _ => Ok(()),
    }
}

fn length(sequence: &[Range<u64>]) -> u64 {
    sequence.iter().map(|range| range.end - range.start).sum()
}

/// Keeps chunk `index` of `count` of a sequence, cut as `torch.chunk` does: all chunks have the length of the first,
/// except for the last non-empty one. Chunks after that are empty.
fn chunk(sequence: &mut Bounds, count: u64, index: u64) {
    let all = length(sequence);
    let len = all.div_ceil(count);
    let (from, to) = (len.saturating_mul(index).min(all), len.saturating_mul(index + 1).min(all));
    let mut at = 0;
    sequence.retain_mut(|range| {
        let first = at;
        at += range.end - range.start;
        let (start, end) = (from.max(first), to.min(at));
        *range = range.start + (start - first).min(at - first)..range.end - (at - end).min(at - first);
        start < end
    });
}

/// Cuts a sequence into `factor` chunks, and returns chunk `index` of `count` of each of them, one after another.
fn strided(sequence: &Bounds, factor: u64, count: u64, index: u64) -> Bounds {
    let mut found = Bounds::new();
    // There are at most as many non-empty chunks as the sequence has indices.
    for outer in 0..factor.min(length(sequence)) {
        let mut inner = sequence.clone();
        chunk(&mut inner, factor, outer);
        chunk(&mut inner, count, index);
        for range in inner {
            match found.last_mut() {
                Some(last) if last.end == range.start => last.end = range.end,
                _ => found.push(range),
            }
        }
    }
    found
}
