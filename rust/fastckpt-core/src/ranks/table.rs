//! What all ranks of a save know: the tensors, the layout of their files, and who has what of them.

use crate::error::{Error, Result};
use crate::format::families::Apart;
use crate::format::groups::Group;
use crate::format::layout::{self, Plan, TensorSpec};
use crate::share::{self, Share, Spread};

/// The table of a save. It is the same on every rank.
#[derive(Debug)]
pub struct Table {
    /// The tensors.
    pub tensors: Vec<TensorSpec>,
    /// The layout of their files.
    pub plan: Plan,
    /// Who has which boxes of them.
    pub share: Share,
}

impl Table {
    /// Lays out `tensors`, each with the indices of its spreads, over the files of `groups`, of about `shard_size`
    /// bytes each.
    pub fn new(
        tensors: Vec<TensorSpec>,
        spread: Vec<Vec<u32>>,
        spreads: Vec<Spread>,
        ranks: u32,
        (groups, shard_size, block_size): (&[Group], u64, u64),
    ) -> Result<Self> {
        if spread.len() != tensors.len() {
            return Err(Error::Invalid("each tensor needs its spreads".to_owned()));
        }
        let plan = layout::plan(&tensors, groups, shard_size, block_size)?;
        let shared = tensors.iter().zip(&plan.places).zip(spread).map(|((tensor, place), spreads)| {
            let shape = tensor.logical.as_ref().map_or(&tensor.shape, |(_, shape)| shape);
            share::Tensor {
                name: tensor.name.clone(),
                stored: tensor.bytes().unwrap_or(0),
                shape: shape.clone(),
                shard: place.0,
                offset: place.1,
                spreads,
            }
        });
        let share = Share::new(files(&plan), block_size, shared.collect(), spreads, ranks)?;
        Ok(Self { tensors, plan, share })
    }

    /// The same, but every byte of these tensors comes from the lowest rank that has it.
    pub fn first(&self, tensors: impl Fn(usize) -> bool) -> Result<Self> {
        let share = self.share.elsewhere(files(&self.plan), &self.plan.places)?.first(tensors);
        let taken = self.plan.shards.iter().enumerate().filter(|(_, shard)| shard.taken.is_some());
        let share = share.without(taken.map(|(index, _)| index));
        Ok(Self { tensors: self.tensors.clone(), plan: self.plan.clone(), share })
    }

    /// The same tensors, some of them in shards of their own, or in such as are taken over and not written.
    pub fn apart(&self, groups: &[Group], shard_size: u64, apart: &Apart<'_>) -> Result<Self> {
        let sizes = (shard_size, self.plan.block_size);
        let plan = layout::plan_apart(&self.tensors, groups, sizes, apart)?;
        let taken = plan.shards.iter().enumerate().filter(|(_, shard)| shard.taken.is_some());
        let share = self.share.elsewhere(files(&plan), &plan.places)?.without(taken.map(|(index, _)| index));
        Ok(Self { tensors: self.tensors.clone(), plan, share })
    }
}

/// Where the data of each file starts, and its length.
fn files(plan: &Plan) -> Vec<(u64, u64)> {
    plan.shards.iter().map(|shard| (shard.header.len() as u64, shard.bytes)).collect()
}
