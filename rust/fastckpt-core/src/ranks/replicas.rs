//! Compares the copies of tensors that several ranks hold: each rank sums its own copy, and only the sums travel.

use std::sync::{Mutex, PoisonError};

use super::held::Held;
use super::table::Table;
use crate::engine::job::Progress;
use crate::engine::options::Options;
use crate::engine::pool::{Pool, batches};
use crate::error::{Error, Result};
use crate::format::checksum;
use crate::share::{Copied, Depth, Item};

/// Returns the sum of all bytes of a part, given by tensor and part; `None` if only the host can sum them.
pub type SumOf<'a> = &'a mut (dyn FnMut(usize, u32) -> Result<Option<u64>> + 'a);

/// Parts of fewer bytes are always summed by the host: a sum on a device takes many steps.
const LEAST: u64 = 1 << 20;

/// A rank's findings about the cells that it shares with other ranks.
#[derive(Debug)]
pub struct Replicas {
    cells: Vec<Copied>,
    sums: Vec<u64>,
    holders: Vec<Vec<u32>>,
}

/// The combined sum of all cells that the same ranks hold, found by one of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Digest {
    /// The number that identifies these ranks.
    pub holders: u64,
    /// The number of these ranks.
    pub size: usize,
    /// The sum of the sums.
    pub sum: u64,
}

/// A cell: its tensor, its first byte there, its number and its sum.
pub type Cell = (usize, u64, u32, u64);

impl Replicas {
    /// Sums the cells that `rank` shares with other ranks.
    pub(super) fn new(
        table: &Table,
        rank: u32,
        held: &Held,
        (depth, sum_of): (Depth, SumOf<'_>),
        options: &Options,
        progress: Progress<'_>,
    ) -> Result<Self> {
        let (cells, holders) = table.share.copied(rank, depth)?;
        let mut known = vec![None; cells.len()];
        for (cell, known) in cells.iter().zip(&mut known) {
            let (part, of_part) = cell.part;
            let len: u64 = cell.items.iter().map(|item| item.len).sum();
            let elsewhere = cell.items.first().is_some_and(|item| held.pull(item).is_some());
            if cell.whole && of_part && len >= LEAST && elsewhere {
                *known = sum_of(cell.tensor, part)?;
                if !progress(0, 0) {
                    return Err(Error::Interrupted);
                }
            }
        }
        let unknown = cells.iter().enumerate().filter(|(number, _)| known[*number].is_none());
        let items: Vec<(usize, usize, &Item)> = unknown
            .flat_map(|(number, cell)| (0..).zip(&cell.items).map(move |(at, item)| (number, at, item)))
            .collect();
        let part = |&(_, _, item): &(usize, usize, &Item)| (item.len, held.pull(item).is_some());
        let (batches, total) = batches(items.iter().map(part));
        let found: Vec<_> = cells.iter().map(|cell| Mutex::new(vec![0; cell.items.len()])).collect();
        let batch = |number: usize| {
            let items = &items[batches[number].clone()];
            let sums = held.sums(&items.iter().map(|&(_, _, item)| item).collect::<Vec<_>>())?;
            for (&(cell, at, _), sum) in items.iter().zip(sums) {
                found[cell].lock().unwrap_or_else(PoisonError::into_inner)[at] = sum;
            }
            Ok(())
        };
        let pool = Pool::new("fastckpt-compare", total, options);
        pool.run(batches.len(), &mut || progress(0, 0), &batch)?;
        let sum = |((cell, sums), known): ((&Copied, Mutex<Vec<u64>>), Option<u64>)| {
            let sums = sums.into_inner().unwrap_or_else(PoisonError::into_inner);
            let all = cell.items.iter().zip(sums);
            let joined =
                all.fold(checksum::of(&[]), |all, (item, sum)| checksum::combine(all, sum, item.len));
            known.unwrap_or(joined)
        };
        let sums = cells.iter().zip(found).zip(known).map(sum).collect();
        Ok(Self { cells, sums, holders })
    }

    /// For each set of ranks, the combined sum of the cells that they hold.
    #[must_use]
    pub fn digests(&self) -> Vec<Digest> {
        let mut told = vec![Vec::new(); self.holders.len()];
        for (holders, cell) in self.cells() {
            let (tensor, start, number, sum) = cell;
            for number in [tensor as u64, start, u64::from(number), sum] {
                told[holders].extend(number.to_le_bytes());
            }
        }
        self.holders
            .iter()
            .zip(told)
            .map(|(ranks, told)| Digest {
                holders: number(ranks),
                size: ranks.len(),
                sum: checksum::of(&told),
            })
            .collect()
    }

    /// The cells that the ranks with these numbers hold.
    #[must_use]
    pub fn of_holders(&self, numbers: &[u64]) -> Vec<Cell> {
        let wanted = |holders: usize| numbers.contains(&number(&self.holders[holders]));
        self.cells().filter(|&(holders, _)| wanted(holders)).map(|(_, cell)| cell).collect()
    }

    fn cells(&self) -> impl Iterator<Item = (usize, Cell)> {
        let cells = self.cells.iter().zip(&self.sums);
        cells.map(|(cell, &sum)| (cell.holders, (cell.tensor, cell.start, cell.cell, sum)))
    }

    /// Up to about `most` of the compared bytes of a cell. All ranks that hold the cell return the same bytes.
    pub(super) fn bytes(
        &self,
        held: &Held,
        (tensor, start, cell): (usize, u64, u32),
        most: u64,
    ) -> Result<Vec<u8>> {
        let like = |one: &&Copied| (one.tensor, one.start, one.cell) == (tensor, start, cell);
        let one = self.cells.iter().find(like);
        let one =
            one.ok_or_else(|| Error::Invalid(format!("this part of tensor {tensor} is not compared")))?;
        let all: u64 = one.items.iter().map(|item| item.len).sum();
        let mut bytes = Vec::new();
        for item in one.items.iter().step_by(all.div_ceil(most).max(1) as usize) {
            let first = bytes.len();
            bytes.resize(first + item.len as usize, 0);
            held.pack_all(std::slice::from_ref(item), None, &mut bytes[first..], |_| ())?;
            if bytes.len() as u64 >= most {
                break;
            }
        }
        bytes.truncate(most as usize);
        Ok(bytes)
    }
}

/// A number that identifies a set of ranks, and that each of them can compute.
fn number(ranks: &[u32]) -> u64 {
    checksum::of(&ranks.iter().flat_map(|rank| rank.to_le_bytes()).collect::<Vec<_>>())
}
