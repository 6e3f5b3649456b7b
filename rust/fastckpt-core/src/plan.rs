//! From tensors to shards, extents and blocks. Pure: nothing here does I/O (`docs/format.md`, 2).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap};
use std::ops::Range;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::align::{self, PAGE};
use crate::bounds::{MAX_DIMENSIONS, MAX_HEADER, MAX_SHARDS, MAX_TENSORS};
use crate::error::{Error, Result};
use crate::options::{SINGLE, SPLIT_ABOVE};

/// Data begins at a multiple of this, in bytes: the largest element of any dtype, and what NumPy aligns large arrays to.
pub const DATA_ALIGNMENT: u64 = 16;
/// The name that safetensors keeps for itself.
pub const RESERVED_NAME: &str = "__metadata__";

/// The dtype that safetensors calls `name`.
#[must_use]
pub fn dtype(name: &str) -> Option<Dtype> {
    serde_json::from_value(serde_json::Value::String(name.to_owned())).ok()
}

/// What the plan must know of a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// Its name in the file.
    pub name: String,
    /// The dtype under which it is stored.
    pub dtype: Dtype,
    /// The shape under which it is stored.
    pub shape: Vec<u64>,
    /// True dtype and shape, where safetensors cannot name them.
    pub true_type: Option<(String, Vec<u64>)>,
    /// Its address modulo a page, where it is host memory that can be written as it lies.
    pub residue: Option<u64>,
}

impl TensorSpec {
    /// Its size in bytes, or nothing if that is no whole number of bytes or beyond `i64`.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        byte_size(self.dtype, &self.shape)
    }

    /// The alignment it wants, which divides its size: bytes of an element; for one stored as bytes, whose true elements
    /// are not known here, the largest power of two up to 16 that divides its size.
    fn element(&self) -> u64 {
        if self.true_type.is_some() {
            let bytes = self.bytes().unwrap_or(0);
            1 << bytes.trailing_zeros().min(4)
        } else {
            (self.dtype.bitsize() as u64 / 8).max(1)
        }
    }
}

/// The size in bytes of a tensor, or nothing if that is no whole number of bytes or beyond `i64`.
#[must_use]
pub fn byte_size(dtype: Dtype, shape: &[u64]) -> Option<u64> {
    // A zero anywhere makes the tensor empty, however large the product of the rest.
    if shape.contains(&0) {
        return Some(0);
    }
    let elements = shape.iter().try_fold(1u64, |all, &size| all.checked_mul(size))?;
    let bits = elements.checked_mul(dtype.bitsize() as u64)?;
    (bits.is_multiple_of(8) && i64::try_from(bits / 8).is_ok()).then_some(bits / 8)
}

/// Where a tensor lies in its shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Index of the tensor in the checkpoint.
    pub tensor: usize,
    /// First byte, counted in the file.
    pub offset: u64,
    /// Number of bytes.
    pub bytes: u64,
}

impl Placement {
    /// The byte after its last.
    #[must_use]
    pub const fn end(&self) -> u64 {
        self.offset + self.bytes
    }
}

/// One file.
#[derive(Debug, Clone)]
pub struct Shard {
    /// Its name inside the checkpoint.
    pub file: String,
    /// Length field, JSON and padding: all bytes before the data.
    pub header: Vec<u8>,
    /// Its tensors in file order, packed.
    pub placements: Vec<Placement>,
    /// Length of the file.
    pub bytes: u64,
}

impl Shard {
    /// Whether copying its data takes less time than asking what memory it lies in.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.bytes - (self.header.len() as u64) < SINGLE
    }
}

/// A part of one tensor that lies in one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extent {
    /// Index of the tensor in the checkpoint.
    pub tensor: usize,
    /// Which of the tensor's extents this is.
    pub index: u64,
    /// First byte, counted in the file.
    pub offset: u64,
    /// First byte, counted in the tensor.
    pub start: u64,
    /// Number of bytes, never zero.
    pub len: u64,
}

/// Which part of `placement` lies in the block that begins at `block` and is `block_size` long.
#[must_use]
pub fn extent(placement: &Placement, block: u64, block_size: u64) -> Option<Extent> {
    let from = placement.offset.max(block);
    let to = placement.end().min(block + block_size);
    (from < to).then(|| Extent {
        tensor: placement.tensor,
        index: block / block_size - placement.offset / block_size,
        offset: from,
        start: from - placement.offset,
        len: to - from,
    })
}

/// Over how many blocks a range of a file spreads.
#[must_use]
pub const fn extent_count(offset: u64, bytes: u64, block_size: u64) -> u64 {
    if bytes == 0 { 0 } else { (offset + bytes - 1) / block_size - offset / block_size + 1 }
}

/// The placements, sorted by offset and not overlapping, that touch `range`.
#[must_use]
pub fn touching(placements: &[Placement], range: Range<u64>) -> &[Placement] {
    let first = placements.partition_point(|p| p.end() <= range.start);
    let last = placements.partition_point(|p| p.offset < range.end);
    placements.get(first..last).unwrap_or(&[])
}

/// How a checkpoint is laid out.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Bytes of a block.
    pub block_size: u64,
    /// The files.
    pub shards: Vec<Shard>,
    /// For each tensor, its shard and its offset there.
    pub places: Vec<(usize, u64)>,
}

/// Lays out `tensors` over shards of at most about `shard_size` bytes, and over at least `workers` of them once their shares are
/// large enough to be worth it. They will be written in blocks of `block_size`.
pub fn plan(tensors: &[TensorSpec], shard_size: u64, workers: usize, block_size: u64) -> Result<Plan> {
    let sizes = checked_sizes(tensors, MAX_TENSORS)?;
    let total: u64 = sizes.iter().sum();
    let split = if total / workers.max(1) as u64 > SPLIT_ABOVE { workers } else { 1 };
    let least = total.div_ceil(shard_size.max(1)).max(1);
    let mut count = usize::try_from(least).unwrap_or(usize::MAX).max(split).min(tensors.len().max(1));
    let members = loop {
        if count > MAX_SHARDS {
            return Err(Error::Invalid(format!(
                "this state would need more than {MAX_SHARDS} shards: give a larger shard_size"
            )));
        }
        let members = balance(&sizes, count);
        let fits = |shard: &Vec<usize>| {
            let bytes: u64 = shard.iter().map(|&t| sizes[t]).sum();
            shard.len() < 2 || (bytes <= shard_size && header_estimate(tensors, shard) < MAX_HEADER)
        };
        // A tensor larger than the shard size has a shard of its own; other shards come down as the count grows.
        let overfull = members.iter().filter(|shard| !fits(shard)).count();
        if overfull == 0 || count == tensors.len() {
            break members;
        }
        count = (count + overfull.max(count / 8)).min(tensors.len());
    };
    let mut places = vec![(0, 0); tensors.len()];
    let mut shards = Vec::with_capacity(members.len());
    for (index, shard) in members.iter().enumerate() {
        let file = shard_name(index, members.len());
        shards.push(lay_out(tensors, &sizes, shard, file)?);
        for placement in &shards[index].placements {
            places[placement.tensor] = (index, placement.offset);
        }
    }
    Ok(Plan { block_size, shards, places })
}

/// Sizes in bytes of all tensors, once everything that could make the plan fail was looked at.
fn checked_sizes(tensors: &[TensorSpec], most: usize) -> Result<Vec<u64>> {
    if tensors.len() > most {
        return Err(Error::TooLarge(format!(
            "it has {} tensors, more than the {most} that one checkpoint holds",
            tensors.len()
        )));
    }
    let mut seen = HashMap::with_capacity(tensors.len());
    let mut total = 0u64;
    tensors
        .iter()
        .enumerate()
        .map(|(index, tensor)| {
            if seen.insert(tensor.name.as_str(), index).is_some() || tensor.name == RESERVED_NAME {
                return Err(Error::Invalid(format!("the tensor name `{}` is taken", tensor.name)));
            }
            if tensor.shape.len() > MAX_DIMENSIONS {
                let (name, dimensions) = (&tensor.name, tensor.shape.len());
                return Err(Error::TooLarge(format!(
                    "tensor `{name}` has {dimensions} dimensions, more than the {MAX_DIMENSIONS} of the format"
                )));
            }
            let bytes = tensor.bytes().filter(|bytes| {
                total = total.saturating_add(*bytes);
                i64::try_from(total).is_ok()
            });
            bytes.ok_or_else(|| Error::Invalid(format!("tensor `{}` has an impossible size", tensor.name)))
        })
        .collect()
}

/// Places whole tensors on `count` shards, the longest first and each where least lies yet; the members of a shard in state order.
fn balance(sizes: &[u64], count: usize) -> Vec<Vec<usize>> {
    if count == 1 {
        return vec![(0..sizes.len()).collect()];
    }
    let mut order: Vec<usize> = (0..sizes.len()).collect();
    order.sort_by_key(|&tensor| Reverse(sizes[tensor]));
    // Bytes first, then tensors: empty ones spread too.
    let mut least: BinaryHeap<Reverse<(u64, usize, usize)>> =
        (0..count).map(|s| Reverse((0, 0, s))).collect();
    let mut members = vec![Vec::new(); count];
    for tensor in order {
        if let Some(Reverse((bytes, tensors, shard))) = least.pop() {
            members[shard].push(tensor);
            least.push(Reverse((bytes + sizes[tensor], tensors + 1, shard)));
        }
    }
    for shard in &mut members {
        shard.sort_unstable();
    }
    members
}

/// An upper bound of the header's bytes: JSON escapes a byte to at most six, numbers have at most 20 digits.
fn header_estimate(tensors: &[TensorSpec], shard: &[usize]) -> u64 {
    let entry = |&t: &usize| 100 + 6 * tensors[t].name.len() as u64 + 21 * tensors[t].shape.len() as u64;
    shard.iter().map(entry).sum::<u64>() + PAGE
}

/// The name Hugging Face gives shard `index` of `count`.
fn shard_name(index: usize, count: usize) -> String {
    if count == 1 {
        "model.safetensors".to_owned()
    } else {
        format!("model-{:05}-of-{count:05}.safetensors", index + 1)
    }
}

/// Orders the tensors of one shard, places them and builds the header (`docs/format.md`, 2.1).
fn lay_out(tensors: &[TensorSpec], sizes: &[u64], members: &[usize], file: String) -> Result<Shard> {
    let whole_pages = |t: usize| sizes[t] > 0 && align::is(sizes[t], PAGE);
    let mut order = members.to_vec();
    order.sort_by_key(|&t| if whole_pages(t) { Reverse(u64::MAX) } else { Reverse(tensors[t].element()) });
    let mut at = 0;
    let mut entries = Vec::with_capacity(order.len());
    let mut placements = Vec::with_capacity(order.len());
    for &tensor in &order {
        let spec = &tensors[tensor];
        let end = at + sizes[tensor];
        let info = TensorInfo {
            dtype: spec.dtype,
            shape: spec.shape.iter().map(|&size| size as usize).collect(),
            data_offsets: (at as usize, end as usize),
        };
        entries.push((spec.name.clone(), info));
        placements.push(Placement { tensor, offset: at, bytes: sizes[tensor] });
        at = end;
    }
    let residue = residue(tensors, sizes, &order);
    let header = header(entries, &file, residue, MAX_HEADER)?;
    let data = header.len() as u64;
    for placement in &mut placements {
        placement.offset += data;
    }
    Ok(Shard { file, header, placements, bytes: data + at })
}

/// Where data is to begin modulo a page: where most bytes of memory lie, so that their place in the file is congruent with their
/// address. Only tensors of whole pages count, because they lie at whole pages from the data's begin.
fn residue(tensors: &[TensorSpec], sizes: &[u64], members: &[usize]) -> u64 {
    let mut bytes: BTreeMap<u64, u64> = BTreeMap::new();
    for &tensor in members.iter().filter(|&&tensor| sizes[tensor] > 0 && align::is(sizes[tensor], PAGE)) {
        if let Some(residue) = tensors[tensor].residue {
            *bytes.entry(residue % PAGE).or_default() += sizes[tensor];
        }
    }
    // Elements stay aligned in the file too, for those who map it.
    let aligned = bytes.into_iter().filter(|(residue, _)| align::is(*residue, DATA_ALIGNMENT));
    aligned.max_by_key(|&(residue, bytes)| (bytes, Reverse(residue))).map_or(0, |(residue, _)| residue)
}

/// Length field, JSON and padding up to `residue` beyond a whole page.
fn header(entries: Vec<(String, TensorInfo)>, file: &str, residue: u64, most: u64) -> Result<Vec<u8>> {
    let count = entries.len();
    let invalid = |what: String| Error::Invalid(format!("cannot build the header of shard `{file}`: {what}"));
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), entries).map_err(|error| invalid(error.to_string()))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|error| invalid(error.to_string()))?;
    let least = 8 + json.len() as u64;
    let begin = align::up(least.saturating_sub(residue), PAGE) + residue;
    json.resize(begin as usize - 8, b' ');
    if json.len() as u64 > most {
        let len = json.len();
        return Err(Error::TooLarge(format!(
            "the header of shard `{file}` takes {len} bytes for the names of {count} tensors, more than the {most} that \
             readers of safetensors take"
        )));
    }
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.append(&mut json);
    Ok(header)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::options::BLOCK_SIZE as BLOCK;

    fn spec(name: &str, dtype: Dtype, shape: &[u64]) -> TensorSpec {
        TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec(), true_type: None, residue: None }
    }

    #[test]
    fn whole_pages_come_first_then_large_elements() {
        let tensors = [
            spec("odd", Dtype::U8, &[3]),
            spec("page", Dtype::U8, &[4096]),
            spec("none", Dtype::F64, &[0]),
            spec("wide", Dtype::F64, &[3]),
            spec("pages", Dtype::F32, &[4096]),
        ];
        let plan = plan(&tensors, u64::MAX, 1, BLOCK).unwrap();
        let shard = &plan.shards[0];
        let names: Vec<_> = shard.placements.iter().map(|p| tensors[p.tensor].name.as_str()).collect();
        assert_eq!(names, ["page", "pages", "none", "wide", "odd"]);
        assert_eq!(shard.bytes, shard.header.len() as u64 + 4096 + 16384 + 24 + 3);
    }

    #[test]
    fn data_begins_where_most_bytes_lie() {
        let residues = |all: &[(u64, u64)]| {
            let tensors = all.iter().enumerate().map(|(index, &(bytes, residue))| TensorSpec {
                residue: Some(residue),
                ..spec(&format!("t{index}"), Dtype::U8, &[bytes])
            });
            let plan = plan(&tensors.collect::<Vec<_>>(), u64::MAX, 1, BLOCK).unwrap();
            plan.shards[0].header.len() as u64 % PAGE
        };
        let page = PAGE;
        assert_eq!(residues(&[(2 * page, 16), (3 * page, 64), (page, 16)]), 16);
        assert_eq!(residues(&[(2 * page, 16), (3 * page + 4096, 64)]), 64);
        // What has no whole pages, or would leave the file's elements unaligned, has no say.
        assert_eq!(residues(&[(2 * page + 1, 16), (page, 64), (0, 32)]), 64);
        assert_eq!(residues(&[(page, 8)]), 0);
        assert_eq!(residues(&[(page, 4096 + 32)]), 32);
    }

    #[test]
    fn shards_keep_to_their_size_and_a_giant_has_its_own() {
        let mut tensors: Vec<_> = (0..20).map(|i| spec(&format!("t{i}"), Dtype::U8, &[100])).collect();
        tensors.push(spec("giant", Dtype::U8, &[5000]));
        let plan = plan(&tensors, 250, 1, BLOCK).unwrap();
        for shard in &plan.shards {
            let data = shard.bytes - shard.header.len() as u64;
            assert!(data <= 250 || shard.placements.len() == 1, "{data} bytes in {}", shard.file);
        }
        assert_eq!(plan.shards[0].file, format!("model-00001-of-{:05}.safetensors", plan.shards.len()));
    }

    #[test]
    fn large_states_are_split_over_the_workers_and_small_ones_are_not() {
        let large: Vec<_> = (0..8).map(|i| spec(&format!("t{i}"), Dtype::U8, &[256 << 20])).collect();
        assert_eq!(plan(&large, u64::MAX, 4, BLOCK).unwrap().shards.len(), 4);
        assert_eq!(plan(&large[..2], u64::MAX, 4, BLOCK).unwrap().shards.len(), 1);
    }

    #[test]
    fn what_cannot_be_laid_out_is_an_error() {
        let twice = [spec("a", Dtype::U8, &[1]), spec("a", Dtype::U8, &[1])];
        let reserved = [spec(RESERVED_NAME, Dtype::U8, &[1])];
        let huge = [spec("a", Dtype::F64, &[1 << 62])];
        let sum = [spec("a", Dtype::U8, &[1 << 62]), spec("b", Dtype::U8, &[1 << 62])];
        let halves = [spec("a", Dtype::F4, &[3])];
        for tensors in [&twice[..], &reserved, &huge, &sum, &halves] {
            assert!(plan(tensors, 1 << 30, 1, BLOCK).is_err(), "{tensors:?}");
        }
    }

    #[test]
    fn what_is_too_large_is_named() {
        let deep = [spec("deep", Dtype::U8, &[1; MAX_DIMENSIONS + 1])];
        let error = plan(&deep, 1 << 30, 1, BLOCK).unwrap_err();
        assert!(
            matches!(&error, Error::TooLarge(what) if what.contains("`deep` has 65 dimensions")),
            "{error}"
        );
        let info = TensorInfo { dtype: Dtype::U8, shape: vec![1], data_offsets: (0, 1) };
        let entries = || vec![("n".repeat(5000), info.clone())];
        assert_eq!(header(entries(), "shard", 0, 8184).unwrap().len(), 8192);
        let error = header(entries(), "shard", 0, 8183).unwrap_err();
        assert!(
            matches!(&error, Error::TooLarge(what) if what.contains("`shard` takes 8184 bytes")),
            "{error}"
        );
        let error = checked_sizes(&[spec("a", Dtype::U8, &[1]), spec("b", Dtype::U8, &[1])], 1).unwrap_err();
        assert!(
            matches!(&error, Error::TooLarge(what) if what.contains("2 tensors, more than the 1 ")),
            "{error}"
        );
    }

    #[test]
    fn an_empty_state_is_one_shard_without_data() {
        let plan = plan(&[], 1 << 30, 4, BLOCK).unwrap();
        assert_eq!((plan.shards.len(), plan.shards[0].bytes), (1, 4096));
    }

    proptest! {
        #[test]
        fn every_byte_has_one_place(
            shapes in prop::collection::vec((0usize..4, prop::collection::vec(0u64..3000, 0..3)), 0..40),
            shard_size in 1u64..10_000_000,
            workers in 1usize..5,
            residues in prop::collection::vec(0u64..4096, 40),
        ) {
            let dtypes = [Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::F64];
            let tensors: Vec<_> = shapes.iter().enumerate()
                .map(|(i, (d, shape))| TensorSpec {
                    residue: Some(residues[i]),
                    ..spec(&format!("t.{i}"), dtypes[*d], shape)
                }).collect();
            let plan = plan(&tensors, shard_size, workers, BLOCK).unwrap();
            let mut seen = vec![0; tensors.len()];
            for shard in &plan.shards {
                let mut at = shard.header.len() as u64;
                prop_assert!(align::is(at, DATA_ALIGNMENT));
                for p in &shard.placements {
                    prop_assert_eq!(p.offset, at);
                    prop_assert_eq!(p.bytes, tensors[p.tensor].bytes().unwrap());
                    prop_assert!(p.bytes == 0 || p.offset % tensors[p.tensor].element() == 0);
                    let extents: Vec<_> = (0..shard.bytes.div_ceil(4096))
                        .filter_map(|k| extent(p, k * 4096, 4096)).collect();
                    prop_assert_eq!(extents.len() as u64, extent_count(p.offset, p.bytes, 4096));
                    prop_assert_eq!(extents.iter().map(|e| e.len).sum::<u64>(), p.bytes);
                    prop_assert!(extents.iter().enumerate().all(|(i, e)| e.index == i as u64));
                    seen[p.tensor] += 1;
                    at += p.bytes;
                }
                prop_assert_eq!(at, shard.bytes);
                let n = u64::from_le_bytes(shard.header[..8].try_into().unwrap());
                prop_assert_eq!(n + 8, shard.header.len() as u64);
                let parsed: Metadata = serde_json::from_slice(&shard.header[8..]).unwrap();
                prop_assert_eq!(parsed.data_len() as u64 + shard.header.len() as u64, shard.bytes);
            }
            prop_assert!(seen.iter().all(|&n| n == 1));
        }
    }
}
