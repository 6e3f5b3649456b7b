//! Checksums of ranges of files, put together until they cover every tensor. Pure.

use std::ops::Range;

use super::table::Share;
use crate::error::{Error, Result};
use crate::format::checksum;
use crate::format::geometry::{self, Placement, down};

/// The checksum of a range of a file that lies in one extent: inside one tensor and one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The file.
    pub shard: u32,
    /// The first byte, counted in the file.
    pub start: u64,
    /// The number of bytes.
    pub len: u64,
    /// Their CRC.
    pub crc: u64,
}

impl Piece {
    const fn end(&self) -> u64 {
        self.start + self.len
    }
}

impl Share {
    /// Joins pieces that follow each other in an extent, in any order. Fails if a piece is not inside an extent, or if
    /// two overlap.
    pub fn merge(&self, mut pieces: Vec<Piece>) -> Result<Vec<Piece>> {
        pieces.sort_unstable_by_key(|piece| (piece.shard, piece.start));
        let mut merged: Vec<Piece> = Vec::with_capacity(pieces.len().min(1 << 16));
        let mut extent = (0, 0..0);
        for piece in pieces {
            if extent.0 != piece.shard || piece.start >= extent.1.end {
                extent = (piece.shard, self.extent_of(&piece)?);
            }
            if piece.start < extent.1.start || piece.len == 0 || piece.len > extent.1.end - piece.start {
                return Err(wrong(&piece, "is not inside one tensor and one block"));
            }
            match merged.last_mut() {
                Some(last) if last.shard == piece.shard && last.end() > piece.start => {
                    return Err(wrong(&piece, "was written twice"));
                }
                Some(last)
                    if last.shard == piece.shard
                        && last.end() == piece.start
                        && extent.1.start < piece.start =>
                {
                    last.crc = checksum::combine(last.crc, piece.crc, piece.len);
                    last.len += piece.len;
                }
                _ => merged.push(piece),
            }
        }
        Ok(merged)
    }

    /// The CRCs of the extents of each tensor, in order. Fails if `pieces` do not cover each byte of each tensor once.
    pub fn cover_all(&self, pieces: Vec<Piece>) -> Result<Vec<Vec<u64>>> {
        let merged = self.merge(pieces)?;
        let mut next = merged.iter();
        let mut found = vec![Vec::new(); self.tensors.len()];
        for (shard, tensors) in self.order.iter().enumerate() {
            for &tensor in tensors {
                let placement = self.placement(tensor);
                for (extent, _) in geometry::extents(placement, 0..placement.bytes, self.block_size) {
                    let range = extent.offset..extent.offset + extent.len;
                    let piece = next.next();
                    let here = piece.filter(|piece| piece.shard as usize == shard && piece.start < range.end);
                    match here {
                        Some(piece) if piece.start == range.start && piece.len == extent.len => {
                            found[tensor].push(piece.crc);
                        }
                        _ => {
                            let from = here
                                .filter(|piece| piece.start == range.start)
                                .map_or(range.start, Piece::end);
                            return Err(self.missing(tensor, shard, from..range.end));
                        }
                    }
                }
            }
        }
        Ok(found)
    }

    fn missing(&self, tensor: usize, shard: usize, range: Range<u64>) -> Error {
        let why =
            format!("no rank has written all of bytes {} to {} of file {shard}", range.start, range.end);
        self.invalid(tensor, &why)
    }

    fn placement(&self, tensor: usize) -> Placement {
        let entry = &self.tensors[tensor];
        Placement { tensor, offset: entry.offset, bytes: entry.stored }
    }

    /// The extent that the first byte of `piece` lies in.
    fn extent_of(&self, piece: &Piece) -> Result<Range<u64>> {
        let nowhere = || wrong(piece, "is not in a tensor");
        let order = self.order.get(piece.shard as usize).ok_or_else(nowhere)?;
        let index = order.partition_point(|&tensor| self.placement(tensor).end() <= piece.start);
        let placement = self.placement(*order.get(index).ok_or_else(nowhere)?);
        let extent = geometry::extent(&placement, down(piece.start, self.block_size), self.block_size);
        let extent = extent.filter(|extent| extent.offset <= piece.start).ok_or_else(nowhere)?;
        Ok(extent.offset..extent.offset + extent.len)
    }
}

fn wrong(piece: &Piece, why: &str) -> Error {
    let Piece { shard, start, len, .. } = piece;
    Error::Invalid(format!("the piece of {len} bytes at byte {start} of file {shard} {why}"))
}
