//! The checksums of the ranges that ranks wrote, as sent to the coordinator, and the checksums of the manifest.

use crate::error::{Error, Result};
use crate::format::checksum::{self, Pair};
use crate::format::geometry::{self, Placement};
use crate::format::layout::{Shard, TensorSpec};
use crate::format::manifest::TensorEntry;
use crate::save::{tensor_entry, whole_xz};
use crate::share::Piece;

/// The number of bytes of an encoded piece.
const SIZE: usize = 36;

/// Encodes the pieces.
#[must_use]
pub fn encode(pieces: &[Piece]) -> Vec<u8> {
    let mut all = Vec::with_capacity(pieces.len() * SIZE);
    for piece in pieces {
        all.extend(piece.shard.to_le_bytes());
        for number in [piece.start, piece.len, piece.sum.crc, piece.sum.xz] {
            all.extend(number.to_le_bytes());
        }
    }
    all
}

/// Adds the pieces in `bytes`, which [`encode`] made, to `pieces`.
pub fn decode(bytes: &[u8], pieces: &mut Vec<Piece>) -> Result<()> {
    if !bytes.len().is_multiple_of(SIZE) {
        return Err(Error::Invalid("the checksums of a rank are cut off".to_owned()));
    }
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0, |all, &byte| all << 8 | u64::from(byte));
    pieces.extend(bytes.chunks_exact(SIZE).map(|piece| Piece {
        shard: number(&piece[..4]) as u32,
        start: number(&piece[4..12]),
        len: number(&piece[12..20]),
        sum: Pair { crc: number(&piece[20..28]), xz: number(&piece[28..]) },
    }));
    Ok(())
}

/// The CRC of a shard, given the checksums of the extents of each tensor.
pub(super) fn whole_shard(shard: &Shard, block_size: u64, sums: &[Vec<Pair>]) -> u64 {
    let mut crc = checksum::of(&shard.header);
    for placement in &shard.placements {
        let extents = geometry::extents(*placement, 0..placement.bytes, block_size);
        for ((extent, _), sum) in extents.zip(&sums[placement.tensor]) {
            crc = checksum::combine(crc, sum.crc, extent.len);
        }
    }
    crc
}

/// The manifest's entry for a tensor at `place`, given the checksums of its extents.
pub(super) fn entry(tensor: &TensorSpec, place: (usize, u64), block_size: u64, sums: &[Pair]) -> TensorEntry {
    let placement = Placement { tensor: 0, offset: place.1, bytes: tensor.bytes().unwrap_or(0) };
    let xz = whole_xz(placement, block_size, sums.iter().map(|sum| sum.xz));
    let crc: String = sums.iter().map(|sum| checksum::to_hex(sum.crc)).collect();
    tensor_entry(tensor, place, (&crc, &checksum::to_hex(xz)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_travel_as_bytes() {
        let pieces = [(0, 4160, 7, 1), (u32::MAX, u64::MAX - 1, 1 << 40, u64::MAX - 1)];
        let pieces = pieces.map(|(shard, start, len, crc)| {
            let sum = Pair { crc, xz: crc + 1 };
            Piece { shard, start, len, sum }
        });
        let mut found = Vec::new();
        for piece in &pieces {
            decode(&encode(&[*piece]), &mut found).unwrap();
        }
        assert_eq!(found, pieces);
        decode(&[], &mut found).unwrap();
        let error = decode(&encode(&pieces)[1..], &mut found).unwrap_err();
        assert!(error.to_string().contains("cut off") && found.len() == 2, "{error}");
    }
}
