//! The memory of one rank for boxes of tensors, divided among the items that fill it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::engine::content::{Destination, Push};
use crate::error::{Error, Result};
use crate::share::Item;
use crate::sys::array::Array;
use crate::sys::strided::{Rows, Strided};

/// The destination of one part of a tensor.
pub enum Place {
    /// Host memory.
    Memory(Array),
    /// Elsewhere: bytes are handed over in pieces. Their offsets are counted in the part.
    Push(Push),
}

/// The places of a rank, by tensor and part.
pub type Places = HashMap<(usize, u32), Place>;

/// Bytes of a message for a callback: the callback, their first byte in the part, and the bytes.
pub(super) type Due<'a> = (Push, u64, &'a [u8]);

/// The destination of one item.
pub(super) enum Slot {
    Memory(Strided),
    Push(Push, Arc<Rows>, u64),
}

/// A place for each of `items`, in their order. Each item belongs to one of the rank's own parts, and no byte is in two
/// items.
pub(super) fn slots<'a>(mut places: Places, items: impl Iterator<Item = &'a Item>) -> Result<Vec<Slot>> {
    let items: Vec<_> = items.collect();
    let mut order: Vec<usize> = (0..items.len()).collect();
    // Sorts items of one box next to each other.
    let key =
        |item: &Item| (item.tensor, item.part, Arc::as_ptr(&item.rows).addr(), item.base, item.bytes.start);
    order.sort_by_key(|&at| key(items[at]));
    let mut slots: Vec<Option<Slot>> = Vec::new();
    slots.resize_with(items.len(), || None);
    let mut last: Option<(&Item, Strided)> = None;
    for at in order {
        let item = items[at];
        let Item { tensor, part, .. } = *item;
        let place = places.get_mut(&(tensor, part)).ok_or_else(|| no_place(item))?;
        slots[at] = Some(match place {
            Place::Push(to) => Slot::Push(to.clone(), Arc::clone(&item.rows), item.base.cast_unsigned()),
            Place::Memory(array) => {
                let same = |last: &(&Item, Strided)| {
                    (last.0.tensor, last.0.part, last.0.base) == (tensor, part, item.base)
                        && Arc::ptr_eq(&last.0.rows, &item.rows)
                };
                if !last.as_ref().is_some_and(same) {
                    let rows = array.take(&item.rows, item.base).ok_or_else(|| no_place(item))?;
                    last = Some((item, rows));
                }
                let Some((_, rest)) = &mut last else { return Err(no_place(item)) };
                Slot::Memory(rest.split_off(item.bytes.clone()))
            }
        });
    }
    Ok(slots.into_iter().flatten().collect())
}

fn no_place(Item { tensor, part, .. }: &Item) -> Error {
    Error::Invalid(format!("part {part} of tensor {tensor} has no memory to be read into, or too little"))
}

impl Slot {
    /// The bytes of an item to read here, which are all or a part of its `range`, and their destination.
    pub(super) fn destination(self, range: Range<u64>) -> (Range<u64>, Destination) {
        let destination = match self {
            Self::Memory(rows) => {
                let range = rows.range().clone();
                match rows.alone() {
                    Ok(region) => return (range, Destination::Memory(region)),
                    Err(rows) => Destination::Strided(rows),
                }
            }
            Self::Push(to, rows, base) => Destination::Rows(to, rows, base),
        };
        (range, destination)
    }

    /// Takes the bytes of an item, in the order in which a message has them, or records them in `due` for a callback.
    /// Returns the number of bytes copied.
    pub(super) fn unpack<'a>(self, range: Range<u64>, mut bytes: &'a [u8], due: &mut Vec<Due<'a>>) -> u64 {
        match self {
            Self::Memory(mut rows) => {
                rows.unpack(bytes);
                bytes.len() as u64
            }
            Self::Push(to, rows, base) => {
                for (first, len) in rows.runs(base, range) {
                    let (front, rest) = bytes.split_at(len);
                    due.push((to.clone(), first, front));
                    bytes = rest;
                }
                0
            }
        }
    }
}
