//! Decides which of the ranks that hold the same bytes of a tensor supplies them to a save. Pure.
//!
//! Ranks that hold the same part of a tensor have its **copies**, in ascending order: the first rank has copy 0, the
//! next one copy 1. A tensor is dealt out whole: all of its bytes come from one copy, because copies that are declared
//! equal may differ. Tensors are dealt so that every copy gives about the same number of bytes.

use std::cmp::Reverse;
use std::collections::HashMap;

use super::table::{Deal, Share};
use crate::error::Result;

/// A tensor is not cut into pieces of fewer bytes, except for the last piece. A rank needs only a moment to write this
/// many bytes more than its share.
const RUN: u64 = 64 << 20;
/// A copy may give this fraction more than its share, so that a tensor need not be cut.
const SPARE: u64 = 16;

/// Consecutive tensors that are dealt together.
struct Batch {
    bytes: u64,
    tensors: Vec<usize>,
}

impl Share {
    /// Deals all tensors. All bytes of the tensors in `first` come from copy 0.
    pub(super) fn deal(&self, first: &[bool]) -> Result<Vec<Deal>> {
        let mut deals = vec![Deal::default(); self.tensors.len()];
        // Groups by spreads and number of copies. Each group is balanced separately.
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

    /// Large batches come first, in descending order: each whole from the copy that has given least, or in pieces if
    /// that is too much. Then small ones follow in the order of files, so that a copy gives pieces of few files.
    fn balance(&self, copies: u32, mut batches: Vec<Batch>, deals: &mut [Deal]) {
        let share = batches.iter().map(|batch| batch.bytes).sum::<u64>().div_ceil(u64::from(copies));
        let mut given = vec![0u64; copies as usize];
        batches.sort_by_key(|batch| Reverse(if batch.bytes > share / SPARE { batch.bytes } else { 0 }));
        let mut open = 0;
        for Batch { bytes, tensors } in batches {
            let mut rest = self.in_file(tensors[0], &(0..bytes));
            loop {
                let len = rest.end - rest.start;
                let copy = if bytes > share / SPARE {
                    (0..given.len()).min_by_key(|&copy| given[copy]).unwrap_or(0)
                } else {
                    while open + 1 < given.len() && given[open] + len / 2 > share {
                        open += 1;
                    }
                    open
                };
                // Pieces are kept short: if a copy is spread over several ranks, each should give a part of the tensor.
                let end = (rest.start + RUN).next_multiple_of(self.block_size);
                let cut = given[copy] + len > share + share / SPARE && end + RUN / 2 <= rest.end;
                let run = rest.start..if cut { end } else { rest.end };
                given[copy] += run.end - run.start;
                for &tensor in &tensors {
                    deals[tensor].runs.push((run.end, copy as u32));
                }
                if !cut {
                    break;
                }
                rest.start = end;
            }
        }
    }
}
