//! The tensors of a job: their places in the files, and the ranks that have their bytes. Pure.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::ops::Range;
use std::sync::OnceLock;

use super::bytes::{Shape, len};
use super::cover::Cover;
use super::runs::Owners;
use super::spread::{Groups, Spread};
use crate::error::{Error, Result};
use crate::format::geometry::PAGE;

/// The version of the rules in this folder, and of the layout of messages. Ranks compare it. It changes whenever a rank
/// would write, read, send or expect other bytes.
pub const PLAN: u32 = 8;

/// A tensor of the job.
#[derive(Debug, Clone, Hash)]
pub struct Tensor {
    /// The name of the tensor, for messages.
    pub name: String,
    /// The number of bytes of the tensor in the file.
    pub stored: u64,
    /// The logical shape of the tensor, to which boxes refer.
    pub shape: Vec<u64>,
    /// The file that holds the tensor.
    pub shard: usize,
    /// The offset of the tensor's first byte in the file.
    pub offset: u64,
    /// Indices of the tensor's spreads. If a rank has parts in several spreads, parts of the first spread come first.
    pub spreads: Vec<u32>,
}

/// The copies from which the bytes of a tensor come.
#[derive(Debug, Clone, Default)]
pub(super) struct Deal {
    /// Ranges of the file, one after another: where each ends, and its copy. The last ends with the tensor.
    pub(super) runs: Vec<(u64, u32)>,
    /// Whether every byte comes from that copy. If not, the rank that writes a page may use its own copy of a part that
    /// begins in the page. Such bytes are always compared.
    pub(super) strict: bool,
}

impl Deal {
    /// The copy that gives the byte at `offset` of the file, and the part of the range `tensor` that comes from it.
    pub(super) fn at(&self, offset: u64, tensor: &Range<u64>) -> (u32, Range<u64>) {
        let Some(last) = self.runs.len().checked_sub(1) else { return (0, tensor.clone()) };
        let run = self.runs.partition_point(|&(end, _)| end <= offset).min(last);
        let start = if run == 0 { tensor.start } else { self.runs[run - 1].0 };
        (self.runs[run].1, start..if run == last { tensor.end } else { self.runs[run].0 })
    }
}

/// The tensors of a job, their places and their spreads.
#[derive(Debug)]
pub struct Share {
    /// The start of the data in each file, and the length of the file.
    pub(super) files: Vec<(u64, u64)>,
    pub(super) block_size: u64,
    /// See [`Self::in_pages`].
    pub(super) page: u64,
    /// See [`Self::in_teams`].
    pub(super) grain: u64,
    pub(super) team: u32,
    pub(super) tensors: Vec<Tensor>,
    pub(super) spreads: Vec<Groups>,
    pub(super) ranks: u32,
    /// For each file, its tensors that have bytes, in order.
    pub(super) order: Vec<Vec<usize>>,
    /// The index in `covers` of each tensor's cover.
    pub(super) class: Vec<usize>,
    /// See [`Self::read_apart`].
    pub(super) apart: bool,
    /// See [`Self::first`].
    first: Vec<bool>,
    deals: OnceLock<Vec<Deal>>,
    /// The owners for each purpose.
    pub(super) owners: [OnceLock<Owners>; 2],
    pub(super) team_size: OnceLock<u32>,
    /// Tensors with the same shape, size and spreads have one cover. It is made on demand, from the first of them.
    covers: Vec<(usize, OnceLock<std::result::Result<Cover, String>>)>,
}

impl Share {
    /// The share of `tensors` in `files`. Each file is given by the offset of its data and by its length. Blocks have
    /// `block_size` bytes, whole pages.
    ///
    /// Fails if a spread does not fit `ranks` ranks, or if a tensor is not inside its file.
    pub fn new(
        files: Vec<(u64, u64)>,
        block_size: u64,
        tensors: Vec<Tensor>,
        spreads: Vec<Spread>,
        ranks: u32,
    ) -> Result<Self> {
        if block_size == 0 || !block_size.is_multiple_of(PAGE) || ranks == 0 {
            return Err(Error::Invalid(format!(
                "blocks of {block_size} bytes among {ranks} ranks: blocks must be whole pages, jobs must have ranks"
            )));
        }
        let mut order = vec![Vec::new(); files.len()];
        let (mut class, mut classes) = (Vec::with_capacity(tensors.len()), Vec::new());
        let mut known = HashMap::new();
        for (index, tensor) in tensors.iter().enumerate() {
            let fits = |&(data, bytes): &(u64, u64)| {
                data <= tensor.offset
                    && tensor.offset.checked_add(tensor.stored).is_some_and(|end| end <= bytes)
            };
            let spread = tensor.spreads.iter().all(|&spread| (spread as usize) < spreads.len());
            if !spread || !files.get(tensor.shard).is_some_and(fits) {
                return Err(Error::Invalid(format!("tensor `{}` is not in its file", tensor.name)));
            }
            if tensor.stored > 0 {
                order[tensor.shard].push(index);
            }
            class.push(*known.entry((&tensor.shape, tensor.stored, &tensor.spreads)).or_insert_with(|| {
                classes.push((index, OnceLock::new()));
                classes.len() - 1
            }));
        }
        for in_file in &mut order {
            in_file.sort_by_key(|&tensor| tensors[tensor].offset);
            for pair in in_file.windows(2) {
                let (first, second) = (&tensors[pair[0]], &tensors[pair[1]]);
                if first.offset + first.stored > second.offset {
                    let what = format!("tensors `{}` and `{}` overlap", first.name, second.name);
                    return Err(Error::Invalid(what));
                }
            }
        }
        let spreads = spreads.into_iter().map(|spread| Groups::new(spread, ranks)).collect::<Result<_>>()?;
        Ok(Self {
            files,
            block_size,
            page: PAGE,
            grain: PAGE,
            team: 1,
            tensors,
            spreads,
            ranks,
            order,
            class,
            apart: false,
            first: Vec::new(),
            deals: OnceLock::new(),
            owners: Default::default(),
            team_size: OnceLock::new(),
            covers: classes,
        })
    }

    /// The same share, but each page of `page` bytes has one writer. `page` is the page size of the rank with the
    /// largest pages. A kernel that writes through its cache may write whole pages, with old copies of bytes that the
    /// process did not write. So if a page has two writers, the bytes of one of them can be lost.
    ///
    /// Fails unless blocks are whole pages of that size.
    pub fn in_pages(self, page: u64) -> Result<Self> {
        let fits = page.is_power_of_two() && page >= PAGE && self.block_size.is_multiple_of(page);
        if !fits {
            return Err(Error::Invalid(format!(
                "blocks of {} bytes do not fit pages of {page} bytes",
                self.block_size
            )));
        }
        Ok(Self { page, grain: self.grain.max(page), ..self }.anew())
    }

    /// The same share, but writers change at multiples of `grain` bytes, a power of two, and teams of `team` ranks
    /// write the bytes that their members have. If `team` is 0, the size follows from the ranks' pieces of tensors.
    ///
    /// Fails unless a grain is whole pages.
    pub fn in_teams(self, grain: u64, team: u32) -> Result<Self> {
        if !grain.is_power_of_two() || grain < self.page {
            return Err(Error::Invalid(format!(
                "grains of {grain} bytes do not fit pages of {} bytes",
                self.page
            )));
        }
        Ok(Self { grain, team, ..self }.anew())
    }

    /// The same share, without any values derived from it.
    fn anew(self) -> Self {
        let (deals, owners, team_size) = Default::default();
        Self { deals, owners, team_size, ..self }
    }

    /// The same share, but a save takes every byte of these tensors from the lowest rank that has it.
    #[must_use]
    pub fn first(mut self, tensors: impl Fn(usize) -> bool) -> Self {
        self.first = (0..self.tensors.len()).map(tensors).collect();
        self.anew()
    }

    /// The tensors that have bytes, even in files that no rank reads or writes.
    pub(super) fn with_bytes(&self) -> impl Iterator<Item = usize> {
        (0..self.tensors.len()).filter(|&tensor| self.tensors[tensor].stored > 0)
    }

    /// The number of tensors of which several ranks hold the same bytes.
    pub fn replicated(&self) -> Result<usize> {
        self.with_bytes()
            .try_fold(0, |count, tensor| Ok(count + usize::from(self.cover(tensor)?.copies() > 1)))
    }

    /// For each spread of a tensor, its ranks, ascending.
    #[must_use]
    pub fn groups(&self, tensor: usize) -> Vec<Vec<u32>> {
        self.spreads_of(&self.tensors[tensor]).into_iter().map(Groups::everybody).collect()
    }

    /// The copies from which a save takes each tensor.
    pub(super) fn deals(&self) -> Result<&[Deal]> {
        if let Some(deals) = self.deals.get() {
            return Ok(deals);
        }
        let made = self.deal(&self.first)?;
        Ok(self.deals.get_or_init(|| made))
    }

    /// The same share, but if several ranks want different long parts of an extent, each reads its part. Only checksums
    /// of such parts travel. They are joined ([`Self::merge`]) and compared with the checksum of the extent.
    #[must_use]
    pub fn read_apart(self) -> Self {
        Self { apart: true, ..self }
    }

    /// The same share, but no rank reads or writes these files, as if they had no bytes.
    #[must_use]
    pub fn without(mut self, files: impl Iterator<Item = usize>) -> Self {
        for file in files {
            self.files[file] = (0, 0);
            self.order[file].clear();
        }
        self.anew()
    }

    /// The same tensors in other files. `places` has the file of each tensor, and its offset there.
    pub fn elsewhere(&self, files: Vec<(u64, u64)>, places: &[(usize, u64)]) -> Result<Self> {
        let tensors = self.tensors.iter().zip(places);
        let tensors = tensors.map(|(tensor, &(shard, offset))| Tensor { shard, offset, ..tensor.clone() });
        let spreads = self.spreads.iter().map(|groups| groups.spread().clone()).collect();
        let Self { page, grain, team, .. } = *self;
        let first = self.first.clone();
        Ok(Self {
            page,
            grain,
            team,
            first,
            ..Self::new(files, self.block_size, tensors.collect(), spreads, self.ranks)?
        })
    }

    /// A number that is equal for all ranks that made the same share, and follow the same rules.
    #[must_use]
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        (PLAN, &self.files, self.block_size, &self.tensors, self.ranks, &self.first).hash(&mut hasher);
        (self.page, self.grain, self.team).hash(&mut hasher);
        self.spreads.iter().for_each(|groups| groups.spread().hash(&mut hasher));
        hasher.finish()
    }

    /// The number of ranks.
    #[must_use]
    pub const fn ranks(&self) -> u32 {
        self.ranks
    }

    /// The size of a grain: writers change only at multiples of this number of bytes.
    #[must_use]
    pub const fn grain(&self) -> u64 {
        self.grain
    }

    /// The tensors.
    #[must_use]
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// Size of a block in bytes.
    #[must_use]
    pub const fn block_size(&self) -> u64 {
        self.block_size
    }

    /// The start of the data in each file, and the length of the file.
    #[must_use]
    pub fn files(&self) -> &[(u64, u64)] {
        &self.files
    }

    /// The shape of part `part` of a tensor on `rank`, as an array without gaps; `None` if the rank has no such part.
    pub fn part_shape(&self, rank: u32, tensor: usize, part: u32) -> Result<Option<Vec<u64>>> {
        let Some((groups, group)) = self.part(rank, tensor, part) else { return Ok(None) };
        let mut ranges = Vec::new();
        let found = groups.ranges(group, &self.tensors[tensor].shape, &mut ranges);
        found.map_err(|why| self.invalid(tensor, &why))?;
        Ok(Some(ranges.iter().map(|along| along.iter().map(len).sum()).collect()))
    }

    /// The number of bytes of part `part` of a tensor on `rank`. Fails if the rank has no such part.
    pub fn part_bytes(&self, rank: u32, tensor: usize, part: u32) -> Result<u64> {
        let Some((groups, group)) = self.part(rank, tensor, part) else {
            let what = format!("rank {rank} has no part {part} of tensor {tensor}");
            return Err(Error::Invalid(what));
        };
        let Tensor { stored, shape, .. } = &self.tensors[tensor];
        if *stored == 0 || groups.is_whole() {
            return Ok(*stored);
        }
        let bytes = |shape: Shape| {
            let mut ranges = Vec::new();
            shape.ranges(&self.tensors[tensor].shape, groups, group, &mut ranges)?;
            let along = ranges.iter().map(|along| along.iter().map(len).sum::<u64>());
            Ok(along.product::<u64>() * shape.item)
        };
        Shape::new(shape, *stored).and_then(bytes).map_err(|why: String| self.invalid(tensor, &why))
    }

    /// The spread and the group of a part.
    fn part(&self, rank: u32, tensor: usize, part: u32) -> Option<(&Groups, u32)> {
        let spreads = self.spreads_of(self.tensors.get(tensor)?);
        let mut parts =
            spreads.into_iter().flat_map(|groups| groups.of(rank).map(move |group| (groups, group)));
        parts.nth(part as usize)
    }

    pub(super) fn spreads_of(&self, tensor: &Tensor) -> Vec<&Groups> {
        tensor.spreads.iter().map(|&spread| &self.spreads[spread as usize]).collect()
    }

    /// The cover of a tensor that has bytes.
    pub(super) fn cover(&self, tensor: usize) -> Result<&Cover> {
        let (first, cover) = &self.covers[self.class[tensor]];
        let make = || {
            let Tensor { stored, shape, .. } = &self.tensors[*first];
            let spreads = self.spreads_of(&self.tensors[*first]);
            let whole = spreads.iter().all(|groups| groups.is_whole());
            // If every rank has the whole tensor, each has all bytes, whatever the shape.
            let flat = |why| if whole { Ok(Shape::flat(*stored)) } else { Err(why) };
            let in_bytes = Shape::new(shape, *stored).or_else(flat)?;
            Cover::new(in_bytes, shape, &spreads)
        };
        cover.get_or_init(make).as_ref().map_err(|why| self.invalid(tensor, why))
    }

    pub(super) fn invalid(&self, tensor: usize, why: &str) -> Error {
        Error::Invalid(format!("tensor `{}`: {why}", self.tensors[tensor].name))
    }

    /// The range of the file that holds a range of a tensor.
    pub(super) fn in_file(&self, tensor: usize, range: &Range<u64>) -> Range<u64> {
        let offset = self.tensors[tensor].offset;
        offset + range.start..offset + range.end
    }
}
