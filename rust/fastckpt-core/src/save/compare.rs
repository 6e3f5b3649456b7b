//! Compares a state in memory with its checksums in an earlier checkpoint. Reads nothing from storage.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::whole::whole_xz;
use crate::engine::content::{self, Content};
use crate::engine::job::Progress;
use crate::engine::options::Options;
use crate::engine::pool::{Pool, batches};
use crate::error::Result;
use crate::format::checksum::{self, Pair};
use crate::format::geometry::{self, Extent};
use crate::format::layout::TensorSpec;
use crate::format::manifest::{Body, TensorEntry};

/// A tensor that may be equal to one of the base.
struct Candidate<'a> {
    tensor: usize,
    index: usize,
    entry: &'a TensorEntry,
    /// The number of its first extent among the extents of all candidates.
    first: usize,
    changed: AtomicBool,
}

/// The candidates, and the second checksums of their extents.
struct Comparison<'a> {
    contents: &'a [Content],
    candidates: Vec<Candidate<'a>>,
    block_size: u64,
    xzs: Vec<AtomicU64>,
    /// Extents, each with its candidate.
    extents: Vec<(usize, Extent)>,
    /// Ranges of `extents` that one thread takes at a time.
    batches: Vec<Range<usize>>,
    total: u64,
}

/// For each tensor of a state, its number in the checkpoint `base`, if it has the same name, type and content there. If
/// a tensor differs, little more is read than its bytes up to the first block that differs.
pub(super) fn unchanged(
    tensors: &[TensorSpec],
    contents: &[Content],
    base: &Body,
    options: &Options,
    progress: Progress<'_>,
) -> Result<Vec<Option<usize>>> {
    let comparison = Comparison::new(tensors, contents, base);
    let batch = |number: usize| comparison.batch(number);
    let pool = Pool::new("fastckpt-compare", comparison.total, options);
    pool.run(comparison.batches.len(), &mut || progress(0, 0), &batch)?;
    let mut found = vec![None; tensors.len()];
    for candidate in &comparison.candidates {
        found[candidate.tensor] = comparison.is_same(candidate).then_some(candidate.index);
    }
    Ok(found)
}

impl<'a> Comparison<'a> {
    fn new(tensors: &[TensorSpec], contents: &'a [Content], base: &'a Body) -> Self {
        let (mut candidates, mut extents) = (Vec::new(), Vec::new());
        for (tensor, index) in counterparts(tensors, base) {
            let (entry, first) = (&base.tensors[index], extents.len());
            let own = geometry::extents(entry.placement(tensor), 0..entry.bytes(), base.block_size);
            extents.extend(own.map(|(extent, _)| (candidates.len(), extent)));
            candidates.push(Candidate { tensor, index, entry, first, changed: AtomicBool::new(false) });
        }
        let part =
            |(_, extent): &(usize, Extent)| (extent.len, matches!(contents[extent.tensor], Content::Pull(_)));
        let (batches, total) = batches(extents.iter().map(part));
        let xzs = extents.iter().map(|_| AtomicU64::new(0)).collect();
        Self { contents, candidates, block_size: base.block_size, xzs, extents, batches, total }
    }

    /// Computes the checksums of the extents of a batch, except extents of tensors that are known to have changed.
    fn batch(&self, number: usize) -> Result<()> {
        let live = self.extents[self.batches[number].clone()].iter();
        let live: Vec<_> = live
            .filter(|(candidate, _)| !self.candidates[*candidate].changed.load(Ordering::Relaxed))
            .collect();
        let pulled = |tensor: usize| match &self.contents[tensor] {
            Content::Pull(pull) => Some(pull),
            _ => None,
        };
        if live.first().is_none_or(|(_, extent)| pulled(extent.tensor).is_none()) {
            return live.iter().try_for_each(|(candidate, extent)| {
                let bytes = self.contents[extent.tensor].host(extent.start, extent.len as usize)?;
                self.compare(*candidate, extent, Pair::of_memory(bytes.unwrap_or_default()));
                Ok(())
            });
        }
        let mut buffer = vec![0; live.iter().map(|(_, extent)| extent.len as usize).sum()];
        let mut rest = &mut buffer[..];
        let mut wanted = Vec::with_capacity(live.len());
        for (_, extent) in &live {
            let (to, after) = rest.split_at_mut(extent.len as usize);
            rest = after;
            wanted.extend(pulled(extent.tensor).map(|pull| (pull, extent.start, to)));
        }
        content::fetch(wanted)?;
        let mut rest = &buffer[..];
        for (candidate, extent) in &live {
            let (bytes, after) = rest.split_at(extent.len as usize);
            rest = after;
            self.compare(*candidate, extent, Pair::of(bytes));
        }
        Ok(())
    }

    fn compare(&self, candidate: usize, extent: &Extent, found: Pair) {
        let Candidate { entry, first, changed, .. } = &self.candidates[candidate];
        if entry.extent_crc(extent.index) == Some(found.crc) {
            self.xzs[first + extent.index as usize].store(found.xz, Ordering::Relaxed);
        } else {
            changed.store(true, Ordering::Relaxed);
        }
    }

    /// Whether a tensor whose first checksums all match the base also matches its second checksum.
    fn is_same(&self, candidate: &Candidate<'_>) -> bool {
        let Candidate { entry, first, changed, .. } = candidate;
        let xzs = self.xzs[*first..].iter().map(|xz| xz.load(Ordering::Relaxed));
        let xz = whole_xz(entry.placement(0), self.block_size, xzs);
        !changed.load(Ordering::Relaxed) && checksum::to_hex(xz) == entry.crc64xz()
    }
}

/// The tensors that have a counterpart in `base` with the same name, type and shape and with both checksums, each with
/// the counterpart's number.
pub(crate) fn counterparts(tensors: &[TensorSpec], base: &Body) -> Vec<(usize, usize)> {
    let known: HashMap<_, _> =
        base.tensors.iter().enumerate().map(|(index, entry)| (entry.name(), index)).collect();
    let counterpart = |(tensor, spec): (usize, &TensorSpec)| {
        let &index = known.get(spec.name.as_str())?;
        let entry = &base.tensors[index];
        let fits = is_like(spec, entry) && checksum::from_hex(entry.crc64xz().as_bytes()).is_some();
        fits.then_some((tensor, index))
    };
    tensors.iter().enumerate().filter_map(counterpart).collect()
}

/// Whether a tensor has the type and the shape of an entry.
fn is_like(spec: &TensorSpec, entry: &TensorEntry) -> bool {
    let logical = spec.logical.as_ref();
    (spec.dtype, &spec.shape) == (entry.dtype, &entry.shape())
        && logical.map(|(dtype, shape)| (dtype.as_str(), shape.clone())) == entry.logical()
}
