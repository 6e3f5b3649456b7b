//! Blocks of a read that go from files to a device directly, before workers read the rest.

use std::sync::PoisonError;

use super::checkpoint::Checkpoint;
use super::plan::{PieceDestination, Plan, ReadBlock};
use crate::engine::direct::{self, Candidate, Direct, Moved, Stretch};
use crate::engine::job::Tick;
use crate::engine::options::Options;
use crate::engine::report::Damage;
use crate::error::Result;
use crate::format::checksum;
use crate::telemetry::{Operation, Phase, Planned};

/// Has the caller's callback read the blocks that it can, and removes them from `plan`. What arrived is compared with its
/// checksum where `verify` is set.
pub(super) fn fetch(
    checkpoint: &Checkpoint,
    plan: &mut Plan,
    (verify, files): (bool, usize),
    options: &Options,
    operation: &Operation,
    tick: Tick<'_>,
) -> Result<Moved> {
    let Some(direct) = &options.direct else { return Ok(Moved::default()) };
    let body = &checkpoint.body;
    let candidates = plan.blocks.iter().enumerate().filter_map(|(number, block)| {
        let (index, start) = inside(block, body.block_size, direct)?;
        let stretch = Stretch {
            index,
            start,
            path: direct::path_of(checkpoint.directory(), &body.shards[block.shard].file),
            offset: block.start,
            len: block.end - block.start,
        };
        Some(Candidate { block: number, stretch, file: block.shard })
    });
    let planned = Planned {
        bytes: plan.read,
        files,
        block_size: body.block_size,
        threads: direct::THREADS,
        queue_depth: 1,
    };
    let (sums, phase) = ((body.block_size, verify), (operation, Phase::Read, &planned));
    let moved = direct::run(&direct.mover, candidates.collect(), sums, options.bandwidth_limit, phase, tick)?;
    for &(number, found) in &moved.blocks {
        compare(checkpoint, &mut plan.blocks[number], found)?;
        operation.checked(body.block_size, false);
    }
    let mut number = 0;
    plan.blocks.retain(|_| {
        number += 1;
        !moved.has(number - 1)
    });
    Ok(moved)
}

/// The number that the callback knows a tensor by, if a block lies inside it and all of it goes there, and the block's
/// first byte in the tensor.
fn inside(block: &ReadBlock, block_size: u64, direct: &Direct) -> Option<(usize, u64)> {
    let pieces = block.pieces.lock().unwrap_or_else(PoisonError::into_inner);
    let [piece] = pieces.as_slice() else { return None };
    let PieceDestination::Push(to, None) = &piece.destination else { return None };
    let whole = block.start.is_multiple_of(block_size) && piece.len as u64 == block_size;
    (whole && direct.indices.contains(&to.index)).then_some((to.index, piece.start))
}

/// Compares the checksum of a block that arrived with what was written, if it was asked for.
fn compare(checkpoint: &Checkpoint, block: &mut ReadBlock, found: u64) -> Result<()> {
    for piece in block.pieces.get_mut().unwrap_or_else(PoisonError::into_inner) {
        if let Some(wanted) = piece.crc.filter(|&wanted| wanted != found) {
            return Err(checkpoint.raised(Damage {
                file: checkpoint.body.shards[block.shard].file.clone(),
                offset: piece.offset,
                len: piece.len as u64,
                tensor: Some(checkpoint.body.tensors[piece.tensor].name.clone()),
                reason: checksum::differs(found, wanted),
            }));
        }
    }
    Ok(())
}
