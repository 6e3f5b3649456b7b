//! From tensors to shards, extents and blocks (`docs/format.md`, 2). Pure: nothing here does I/O.

use std::cmp::Reverse;
use std::collections::HashMap;

use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};
use serde::Deserialize;
use serde::de::value::{Error as NoSuchName, StrDeserializer};

use crate::error::{Error, Result};
use crate::format::families::{self, Asked, Member};
pub use crate::format::families::{LinkedShard, Reuse};
use crate::format::geometry::{PAGE, Placement, SINGLE};
use crate::format::groups::{Group, shard_name};
use crate::format::limits::{MAX_DIMENSIONS, MAX_HEADER, MAX_SHARDS, MAX_TENSORS};

/// Data starts this many bytes after a page boundary, like large CPU tensors of PyTorch. In huge pages, `into=` takes
/// 0.12 CPU seconds per GB if the residue fits, and 0.20 if it does not (measured against 0 and 16, the residue of
/// NumPy's arrays). A save takes about the same time either way.
pub const RESIDUE: u64 = 64;
/// The dtype that safetensors calls `name`.
#[must_use]
pub fn dtype(name: &str) -> Option<Dtype> {
    Dtype::deserialize(StrDeserializer::<NoSuchName>::new(name)).ok()
}

/// The properties of a tensor that the plan needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorSpec {
    /// The name of the tensor in the file.
    pub name: String,
    /// The stored dtype.
    pub dtype: Dtype,
    /// The stored shape.
    pub shape: Vec<u64>,
    /// Logical dtype and shape, if safetensors cannot name the dtype.
    pub logical: Option<(String, Vec<u64>)>,
}

impl TensorSpec {
    /// The size in bytes; `None` if it is not a whole number of bytes or exceeds `i64`.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        byte_size(self.dtype, self.shape.iter().copied())
    }

    /// The alignment, which divides the size: the bytes of an element. For a tensor stored as bytes, whose logical
    /// elements are unknown here, it is the largest power of two up to 16 that divides the size.
    fn element(&self) -> u64 {
        if self.logical.is_some() {
            let bytes = self.bytes().unwrap_or(0);
            1 << bytes.trailing_zeros().min(4)
        } else {
            (self.dtype.bitsize() as u64 / 8).max(1)
        }
    }
}

/// The size of a tensor in bytes; `None` if it is not a whole number of bytes or exceeds `i64`.
#[must_use]
pub fn byte_size(dtype: Dtype, shape: impl Iterator<Item = u64>) -> Option<u64> {
    // A size of zero makes the tensor empty, however large the product of the other sizes is.
    let (mut elements, mut empty) = (Some(1u64), false);
    for size in shape {
        (elements, empty) = (elements.and_then(|all| all.checked_mul(size)), empty || size == 0);
    }
    let bits = if empty { 0 } else { elements?.checked_mul(dtype.bitsize() as u64)? };
    (bits.is_multiple_of(8) && i64::try_from(bits / 8).is_ok()).then_some(bits / 8)
}

/// One file.
#[derive(Debug, Clone)]
pub struct Shard {
    /// The name of the file inside the checkpoint.
    pub file: String,
    /// The prefix of its tensors' names, which the header omits.
    pub prefix: String,
    /// All bytes before the data: length field, JSON and padding.
    pub header: Vec<u8>,
    /// The tensors in file order, without gaps.
    pub placements: Vec<Placement>,
    /// Length of the file.
    pub bytes: u64,
    /// The index in [`Reuse::linked`] if the shard is not written. In that case its header is unknown here.
    pub linked: Option<usize>,
}

impl Shard {
    /// Whether it is faster to copy the data than to determine what kind of memory it is in.
    #[must_use]
    pub fn is_short(&self) -> bool {
        self.bytes - (self.header.len() as u64) < SINGLE
    }
}

/// The layout of a checkpoint.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Size of a block in bytes.
    pub block_size: u64,
    /// The files.
    pub shards: Vec<Shard>,
    /// For each tensor, its shard and its offset in the shard.
    pub places: Vec<(usize, u64)>,
}

/// The sizes of shards and blocks in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sizes {
    /// The maximum number of bytes of a shard with several tensors.
    pub shard: u64,
    /// The size of a block, the unit in which shards are written.
    pub block: u64,
}

impl Plan {
    /// The shards that are written.
    pub fn written(&self) -> impl Iterator<Item = &Shard> + Clone {
        self.shards.iter().filter(|shard| shard.linked.is_none())
    }
}

/// Lays out `tensors` over the shards of `groups`. The result depends only on names, dtypes, shapes and these arguments
/// (`docs/format.md`, 2.1): equal states give equal files.
pub fn lay_out(tensors: &[TensorSpec], groups: &[Group], sizes: Sizes, reuse: &Reuse<'_>) -> Result<Plan> {
    if !reuse.unchanged.is_empty() && reuse.unchanged.len() != tensors.len() {
        return Err(Error::Invalid("there must be one flag for each tensor, or none".to_owned()));
    }
    let bytes = checked_sizes(tensors, MAX_TENSORS)?;
    let asked = tensors.iter().zip(&bytes);
    let asked: Vec<_> = asked
        .map(|(tensor, &bytes)| Asked { name: &tensor.name, bytes, entry: header_entry(tensor) })
        .collect();
    let families = families::of(&asked, groups, sizes.shard, reuse)?;
    let count = families.iter().map(Vec::len).sum();
    if count > MAX_SHARDS {
        let what = format!("this state would need more than {MAX_SHARDS} shards: give a larger shard_size");
        return Err(Error::Invalid(what));
    }
    let mut places = vec![(0, 0); tensors.len()];
    let mut shards = Vec::with_capacity(count);
    for (group, family) in groups.iter().zip(&families) {
        for (index, member) in family.iter().enumerate() {
            let file = shard_name(&group.name, index, family.len());
            let shard = match member {
                Member::Tensors(members) => shard_of(tensors, &bytes, members, group, file)?,
                &Member::Linked(number) => Shard {
                    file,
                    prefix: group.prefix.clone(),
                    header: Vec::new(),
                    placements: reuse.linked[number].placements.clone(),
                    bytes: reuse.linked[number].bytes,
                    linked: Some(number),
                },
            };
            for placement in &shard.placements {
                places[placement.tensor] = (shards.len(), placement.offset);
            }
            shards.push(shard);
        }
    }
    Ok(Plan { block_size: sizes.block, shards, places })
}

/// The sizes of all tensors in bytes. Also checks the number of tensors, their dimensions and their total size.
fn checked_sizes(tensors: &[TensorSpec], most: usize) -> Result<Vec<u64>> {
    if tensors.len() > most {
        return Err(Error::TooLarge(format!(
            "it has {} tensors, more than the {most} that one checkpoint holds",
            tensors.len()
        )));
    }
    let mut total = 0u64;
    tensors
        .iter()
        .map(|tensor| {
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

/// An upper bound for the header bytes of one tensor. JSON escapes a byte to at most six, and numbers have at most 20
/// digits.
fn header_entry(tensor: &TensorSpec) -> u64 {
    100 + 6 * tensor.name.len() as u64 + 21 * tensor.shape.len() as u64
}

/// Orders the tensors of one shard, which are passed in order of their names, places them and builds the header
/// (`docs/format.md`, 2.1).
fn shard_of(
    tensors: &[TensorSpec],
    sizes: &[u64],
    members: &[usize],
    group: &Group,
    file: String,
) -> Result<Shard> {
    let whole_pages = |t: usize| sizes[t] > 0 && sizes[t].is_multiple_of(PAGE);
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
        entries.push((spec.name[group.prefix.len()..].to_owned(), info));
        placements.push(Placement { tensor, offset: at, bytes: sizes[tensor] });
        at = end;
    }
    let header = header(entries, &file, MAX_HEADER)?;
    let data = header.len() as u64;
    for placement in &mut placements {
        placement.offset += data;
    }
    Ok(Shard { file, prefix: group.prefix.clone(), header, placements, bytes: data + at, linked: None })
}

/// The length field, the JSON, and padding up to [`RESIDUE`] bytes after a page boundary.
fn header(entries: Vec<(String, TensorInfo)>, file: &str, most: u64) -> Result<Vec<u8>> {
    let count = entries.len();
    let invalid = |what: String| Error::Invalid(format!("cannot build the header of shard `{file}`: {what}"));
    let format = HashMap::from([("format".to_owned(), "pt".to_owned())]);
    let metadata = Metadata::new(Some(format), entries).map_err(|error| invalid(error.to_string()))?;
    let mut json = serde_json::to_vec(&metadata).map_err(|error| invalid(error.to_string()))?;
    let least = 8 + json.len() as u64;
    let begin = least.saturating_sub(RESIDUE).next_multiple_of(PAGE) + RESIDUE;
    json.resize(begin as usize - 8, b' ');
    if json.len() as u64 > most {
        let len = json.len();
        return Err(Error::TooLarge(format!(
            "the header of shard `{file}` takes {len} bytes for the names of {count} tensors, more than \
             the {most} that readers of safetensors accept"
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

    use crate::format::geometry::{BLOCK_SIZE as BLOCK, block_count, extent, extent_count};
    use crate::format::groups::{self, RESERVED_NAME};

    fn spec(name: &str, dtype: Dtype, shape: &[u64]) -> TensorSpec {
        TensorSpec { name: name.to_owned(), dtype, shape: shape.to_vec(), logical: None }
    }

    fn whole(tensors: &[TensorSpec], shard_size: u64) -> Result<Plan> {
        let sizes = Sizes { shard: shard_size, block: BLOCK };
        lay_out(tensors, &groups::of(""), sizes, &Reuse::default())
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
        let plan = whole(&tensors, u64::MAX).unwrap();
        let shard = &plan.shards[0];
        let names: Vec<_> = shard.placements.iter().map(|p| tensors[p.tensor].name.as_str()).collect();
        assert_eq!(names, ["page", "pages", "none", "wide", "odd"]);
        assert_eq!(shard.bytes, shard.header.len() as u64 + 4096 + 16384 + 24 + 3);
    }

    #[test]
    fn the_order_of_the_state_has_no_say() {
        let names = ["b.w", "a.w", "m.w", "c", "", "m.__metadata__", "m"];
        let tensors: Vec<_> = names.iter().map(|name| spec(name, Dtype::F32, &[1024])).collect();
        let groups = groups::of("m.");
        let files = |tensors: &[TensorSpec]| {
            let sizes = Sizes { shard: 3 * 4096, block: BLOCK };
            let plan = lay_out(tensors, &groups, sizes, &Reuse::default()).unwrap();
            plan.shards.into_iter().map(|shard| (shard.file, shard.header)).collect::<Vec<_>>()
        };
        let found = files(&tensors);
        let reversed: Vec<_> = tensors.iter().rev().cloned().collect();
        assert_eq!(found, files(&reversed));
        let files: Vec<_> = found.iter().map(|(file, _)| file.as_str()).collect();
        let training = [1, 2].map(|index| format!("training/training-0000{index}-of-00002.safetensors"));
        assert_eq!(files, ["model.safetensors", &training[0], &training[1]]);
        let header = String::from_utf8_lossy(&found[0].1[8..]).into_owned();
        assert!(header.contains(r#""w":{"#) && !header.contains("m.w"), "{header}");
        assert!(found.iter().all(|(_, header)| header.len() as u64 % PAGE == RESIDUE));
    }

    #[test]
    fn shards_keep_to_their_size_and_a_giant_has_its_own() {
        let mut tensors: Vec<_> = (0..20).map(|i| spec(&format!("t{i}"), Dtype::U8, &[100])).collect();
        tensors.push(spec("giant", Dtype::U8, &[5000]));
        let plan = whole(&tensors, 250).unwrap();
        for shard in &plan.shards {
            let data = shard.bytes - shard.header.len() as u64;
            assert!(data <= 250 || shard.placements.len() == 1, "{data} bytes in {}", shard.file);
        }
        assert_eq!(plan.shards[0].file, format!("model-00001-of-{:05}.safetensors", plan.shards.len()));
    }

    #[test]
    fn what_cannot_be_laid_out_is_an_error() {
        let twice = [spec("a", Dtype::U8, &[1]), spec("a", Dtype::U8, &[1])];
        let reserved = [spec(RESERVED_NAME, Dtype::U8, &[1])];
        let huge = [spec("a", Dtype::F64, &[1 << 62])];
        let sum = [spec("a", Dtype::U8, &[1 << 62]), spec("b", Dtype::U8, &[1 << 62])];
        let halves = [spec("a", Dtype::F4, &[3])];
        for tensors in [&twice[..], &reserved, &huge, &sum, &halves] {
            assert!(whole(tensors, 1 << 30).is_err(), "{tensors:?}");
        }
    }

    #[test]
    fn what_is_too_large_is_named() {
        let deep = [spec("deep", Dtype::U8, &[1; MAX_DIMENSIONS + 1])];
        let error = whole(&deep, 1 << 30).unwrap_err();
        assert!(
            matches!(&error, Error::TooLarge(what) if what.contains("`deep` has 65 dimensions")),
            "{error}"
        );
        let info = TensorInfo { dtype: Dtype::U8, shape: vec![1], data_offsets: (0, 1) };
        let entries = || vec![("n".repeat(5000), info.clone())];
        assert_eq!(header(entries(), "shard", 8248).unwrap().len(), 8256);
        let error = header(entries(), "shard", 8247).unwrap_err();
        assert!(
            matches!(&error, Error::TooLarge(what) if what.contains("`shard` takes 8248 bytes")),
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
        let plan = whole(&[], 1 << 30).unwrap();
        assert_eq!((plan.shards.len(), plan.shards[0].bytes), (1, RESIDUE));
    }

    proptest! {
        #[test]
        fn every_byte_has_one_place(
            shapes in prop::collection::vec((0usize..4, prop::collection::vec(0u64..3000, 0..3)), 0..40),
            shard_size in 1u64..10_000_000,
        ) {
            let dtypes = [Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::F64];
            let tensors: Vec<_> = shapes.iter().enumerate()
                .map(|(i, (d, shape))| spec(&format!("t.{i}"), dtypes[*d], shape)).collect();
            let plan = whole(&tensors, shard_size).unwrap();
            let mut seen = vec![0; tensors.len()];
            for shard in &plan.shards {
                let mut at = shard.header.len() as u64;
                prop_assert_eq!(at % PAGE, RESIDUE);
                for p in &shard.placements {
                    prop_assert_eq!(p.offset, at);
                    prop_assert_eq!(p.bytes, tensors[p.tensor].bytes().unwrap());
                    prop_assert!(p.bytes == 0 || p.offset % tensors[p.tensor].element() == 0);
                    let extents: Vec<_> = (0..block_count(shard.bytes, 4096))
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
