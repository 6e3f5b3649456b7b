//! Joins checksums of ranges of files until they cover every tensor. Pure.

use std::ops::Range;

use super::table::Share;
use crate::error::{Error, Result};
use crate::format::checksum::Pair;
use crate::format::geometry::{self, Placement, down};

/// The checksum of a range of a file within one extent: inside one tensor and one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// The file.
    pub shard: u32,
    /// The first byte, counted in the file.
    pub start: u64,
    /// The number of bytes.
    pub len: u64,
    /// The checksums of these bytes. In a load, only the first checksum has a meaning.
    pub sum: Pair,
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
                    last.sum = last.sum.then(piece.sum, piece.len);
                    last.len += piece.len;
                }
                _ => merged.push(piece),
            }
        }
        Ok(merged)
    }

    /// The checksums of the extents of each tensor, in order. Fails if `pieces` do not cover each byte of each tensor once.
    pub fn cover_all(&self, pieces: Vec<Piece>) -> Result<Vec<Vec<Pair>>> {
        let merged = self.merge(pieces)?;
        let mut next = merged.iter().peekable();
        let mut found = vec![Vec::new(); self.tensors.len()];
        for (shard, tensors) in self.order.iter().enumerate() {
            for &tensor in tensors {
                let placement = self.placement(tensor);
                for (extent, _) in geometry::extents(placement, 0..placement.bytes, self.block_size) {
                    let (mut at, end) = (extent.offset, extent.offset + extent.len);
                    let here = |piece: &&Piece| piece.shard as usize == shard && piece.start < end;
                    if let Some(piece) = next.next_if(|piece| here(piece) && piece.start == at) {
                        found[tensor].push(piece.sum);
                        at = piece.end();
                    }
                    if at < end {
                        let until = next.next_if(here).map_or(end, |piece| piece.start);
                        let why = format!("no rank has written all of bytes {at} to {until} of file {shard}");
                        return Err(self.invalid(tensor, &why));
                    }
                }
            }
        }
        Ok(found)
    }

    fn placement(&self, tensor: usize) -> Placement {
        let entry = &self.tensors[tensor];
        Placement { tensor, offset: entry.offset, bytes: entry.stored }
    }

    /// The extent that contains the first byte of `piece`.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::spread::Spread;
    use super::super::table::Tensor;
    use super::*;

    const PAGE: u64 = geometry::PAGE;

    /// Two files of tensors of `sizes` bytes, and the bytes of the files.
    fn share(sizes: &[Vec<u64>]) -> (Share, Vec<Vec<u8>>) {
        let (mut files, mut tensors) = (Vec::new(), Vec::new());
        for (shard, sizes) in sizes.iter().enumerate() {
            let mut offset = 100;
            for &stored in sizes {
                let name = format!("t{}", tensors.len());
                tensors.push(Tensor { name, stored, shape: vec![stored], shard, offset, spreads: vec![0] });
                offset += stored;
            }
            files.push((100, offset));
        }
        let byte = |at: u64| (at.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8;
        let bytes = files.iter().map(|file: &(u64, u64)| (0..file.1).map(byte).collect()).collect();
        (Share::new(files, 2 * PAGE, tensors, vec![Spread::All], 1).unwrap(), bytes)
    }

    /// The pieces of all extents, cut at `cuts` of each file.
    fn pieces(job: &Share, bytes: &[Vec<u8>], cuts: &[prop::sample::Index]) -> Vec<Piece> {
        let mut found = Vec::new();
        for tensor in 0..job.tensors().len() {
            let (placement, shard) = (job.placement(tensor), job.tensors()[tensor].shard);
            for (extent, _) in geometry::extents(placement, 0..placement.bytes, job.block_size()) {
                let mut ends: Vec<u64> =
                    cuts.iter().map(|cut| cut.index(bytes[shard].len()) as u64).collect();
                ends.retain(|&end| extent.offset < end && end < extent.offset + extent.len);
                ends.extend([extent.offset, extent.offset + extent.len]);
                ends.sort_unstable();
                ends.dedup();
                found.extend(ends.windows(2).map(|ends| Piece {
                    shard: shard as u32,
                    start: ends[0],
                    len: ends[1] - ends[0],
                    sum: Pair::of(&bytes[shard][ends[0] as usize..ends[1] as usize]),
                }));
            }
        }
        found
    }

    proptest! {
        #[test]
        fn pieces_of_any_order_make_the_checksums_of_extents(
            sizes in prop::collection::vec(prop::collection::vec(prop_oneof![1 => Just(0), 5 => 1u64..20_000], 0..4), 2),
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..30),
            whose in prop::collection::vec(any::<u8>(), 60),
            lost in any::<prop::sample::Index>(),
        ) {
            let (share, bytes) = share(&sizes);
            let all = pieces(&share, &bytes, &cuts);
            // Seven ranks, whose pieces are merged in a tree.
            let mut ranks = vec![Vec::new(); 7];
            for (index, piece) in all.iter().enumerate() {
                ranks[whose[index % whose.len()] as usize % 7].push(*piece);
            }
            let merge = |ranks: &[Vec<Piece>]| share.merge(ranks.concat()).unwrap();
            let halves = [merge(&ranks[..3]), merge(&ranks[3..])];
            let merged = merge(&halves);
            prop_assert_eq!(merged.len(), pieces(&share, &bytes, &[]).len());
            let sums = share.cover_all(halves.concat()).unwrap();
            for (tensor, sums) in sums.iter().enumerate() {
                let (placement, shard) = (share.placement(tensor), share.tensors()[tensor].shard);
                let extents = geometry::extents(placement, 0..placement.bytes, share.block_size());
                let of = |(extent, _): (geometry::Extent, Range<u64>)| {
                    Pair::of(&bytes[shard][extent.offset as usize..(extent.offset + extent.len) as usize])
                };
                prop_assert_eq!(sums, &extents.map(of).collect::<Vec<_>>());
            }
            if !all.is_empty() {
                let lost = lost.index(all.len());
                let mut rest = all.clone();
                let Piece { shard, start, len, .. } = rest.remove(lost);
                let error = share.cover_all(rest).unwrap_err().to_string();
                let missing = format!("of bytes {start} to {} of file {shard}", start + len);
                prop_assert!(error.contains(&missing), "{}", error);
                let mut twice = all.clone();
                twice.push(all[lost]);
                prop_assert!(share.merge(twice).unwrap_err().to_string().contains("was written twice"));
            }
        }
    }

    #[test]
    fn a_piece_lies_in_one_extent() {
        let (share, _) = share(&[vec![10, 3 * PAGE], vec![5]]);
        let of =
            |shard, start, len| share.merge(vec![Piece { shard, start, len, sum: Pair { crc: 0, xz: 0 } }]);
        assert!(of(0, 100, 10).is_ok() && of(0, 2 * PAGE, PAGE).is_ok());
        for (shard, start, len) in [
            (0, 99, 1),
            (0, 100, 11),
            (0, 110, 2 * PAGE),
            (0, 100, 0),
            (1, 105, 1),
            (2, 0, 1),
            (0, 110, u64::MAX),
        ] {
            let error = of(shard, start, len).unwrap_err().to_string();
            assert!(error.contains("is not in"), "{error}");
        }
    }
}
