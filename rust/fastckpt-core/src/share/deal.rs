//! Decides which of the ranks that hold the same bytes of a tensor gives them to a save. Pure.
//!
//! Ranks that hold the same part of a tensor, ascending, have its **copies**: copy 0 is the first one's, copy 1 the next
//! one's. A tensor is dealt out whole: all of its bytes come from one copy, because copies that are declared equal may
//! differ. Tensors are dealt so that every copy gives about as many bytes.

use std::collections::HashMap;

use super::table::{Deal, Share};
use crate::error::Result;

/// A tensor is not cut into runs of fewer bytes, except for its last one. Writing one rank's excess over its share
/// takes a moment.
const RUN: u64 = 64 << 20;
/// A copy may give this fraction more than its share, so that a tensor need not be cut.
const SPARE: u64 = 16;

/// Consecutive tensors that are dealt together.
struct Batch {
    bytes: u64,
    tensors: Vec<usize>,
}

impl Share {
    /// The deals of all tensors. Those in `first` come from copy 0, strictly.
    pub(super) fn deal(&self, first: &[bool]) -> Result<Vec<Deal>> {
        let mut deals = vec![Deal::default(); self.tensors.len()];
        // By spreads and number of copies: equal ones are balanced among themselves.
        let mut groups: HashMap<(&[u32], u32), usize> = HashMap::new();
        let mut batches: Vec<(u32, Vec<Batch>)> = Vec::new();
        for tensors in &self.order {
            let mut open = None;
            for &tensor in tensors {
                if first.get(tensor) == Some(&true) {
                    deals[tensor].strict = true;
                    continue;
                }
                let copies = self.cover(tensor)?.copies();
                if copies < 2 {
                    continue;
                }
                let entry = &self.tensors[tensor];
                let group = *groups.entry((&entry.spreads, copies)).or_insert_with(|| {
                    batches.push((copies, Vec::new()));
                    batches.len() - 1
                });
                let of = &mut batches[group].1;
                match of.last_mut() {
                    Some(last)
                        if open == Some(group) && last.bytes < self.block_size && entry.stored < RUN =>
                    {
                        last.bytes += entry.stored;
                        last.tensors.push(tensor);
                    }
                    _ => of.push(Batch { bytes: entry.stored, tensors: vec![tensor] }),
                }
                open = Some(group);
            }
        }
        for (copies, batches) in batches {
            self.balance(copies, batches, &mut deals);
        }
        Ok(deals)
    }

    /// In the order of files, so that a copy gives whole stretches of few files. A batch comes whole from the copy whose
    /// share has its middle. A longer tensor is cut where a share ends.
    fn balance(&self, copies: u32, batches: Vec<Batch>, deals: &mut [Deal]) {
        let share = batches.iter().map(|batch| batch.bytes).sum::<u64>().div_ceil(u64::from(copies));
        let last = u64::from(copies) - 1;
        let mut before = 0;
        for Batch { bytes, tensors } in batches {
            let mut rest = self.in_file(tensors[0], &(0..bytes));
            while rest.start < rest.end {
                let (len, copy) = (rest.end - rest.start, (before / share).min(last));
                let left = (share * (copy + 1)).saturating_sub(before);
                // No shorter runs: if a copy is spread over several ranks, each of them should give some of it.
                let end = (rest.start + left.max(RUN)).next_multiple_of(self.block_size);
                let cut = copy < last && len > left + share / SPARE && end + RUN / 2 <= rest.end;
                let copy = if cut { copy } else { ((before + len / 2) / share).min(last) };
                let end = if cut { end } else { rest.end };
                for &tensor in &tensors {
                    deals[tensor].runs.push((end, copy as u32));
                }
                before += end - rest.start;
                rest.start = end;
            }
        }
    }
}
