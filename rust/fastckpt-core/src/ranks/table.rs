//! What all ranks of a save have in common: the tensors, the layout of the files, and the ranks' parts of the tensors.

use crate::error::{Error, Result};
use crate::format::groups::Group;
use crate::format::layout::{self, Plan, Reuse, Sizes, TensorSpec};
use crate::save::base::State;
use crate::share::{self, Share, Spread};

/// The table of a save. It is the same on every rank.
#[derive(Debug)]
pub struct Table {
    /// The tensors.
    pub tensors: Vec<TensorSpec>,
    /// The layout of the files.
    pub plan: Plan,
    /// Which ranks have which boxes of the tensors.
    pub share: Share,
    /// The inputs of the layout: the groups, the sizes, and for each tensor whether it is declared unchanging.
    groups: Vec<Group>,
    sizes: Sizes,
    frozen: Vec<bool>,
}

impl Table {
    /// Lays out `tensors`, each with the indices of its spreads, over the files of `groups`. For each tensor, `frozen`
    /// is whether it stays unchanged in later saves. `frozen` may be empty.
    pub fn new(
        tensors: Vec<TensorSpec>,
        spread: Vec<Vec<u32>>,
        spreads: Vec<Spread>,
        ranks: u32,
        (groups, sizes, frozen): (&[Group], Sizes, &[bool]),
    ) -> Result<Self> {
        if spread.len() != tensors.len() {
            return Err(Error::Invalid("each tensor needs its spreads".to_owned()));
        }
        let plan = layout::lay_out(&tensors, groups, sizes, &Reuse { unchanged: frozen, linked: &[] })?;
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
        let share = Share::new(files(&plan), sizes.block, shared.collect(), spreads, ranks)?;
        Ok(Self { tensors, plan, share, groups: groups.to_vec(), sizes, frozen: frozen.to_vec() })
    }

    /// The same table, but every byte of these tensors comes from the lowest rank that has it.
    pub fn first(&self, tensors: impl Fn(usize) -> bool) -> Result<Self> {
        let share = self.share_of(&self.plan)?.first(tensors);
        Ok(self.with(self.plan.clone(), share))
    }

    /// The same tensors, some of them in separate shards, or in linked ones, which are not written.
    pub fn beside(&self, reuse: &Reuse<'_>) -> Result<Self> {
        let plan = layout::lay_out(&self.tensors, &self.groups, self.sizes, reuse)?;
        let share = self.share_of(&plan)?;
        Ok(self.with(plan, share))
    }

    /// The share of the tensors in the files of `plan`.
    fn share_of(&self, plan: &Plan) -> Result<Share> {
        let linked = plan.shards.iter().enumerate().filter(|(_, shard)| shard.linked.is_some());
        let share = self.share.elsewhere(files(plan), &plan.places)?;
        Ok(share.without(linked.map(|(index, _)| index)))
    }

    fn with(&self, plan: Plan, share: Share) -> Self {
        let Self { tensors, groups, sizes, frozen, .. } = self;
        let (tensors, groups, frozen) = (tensors.clone(), groups.clone(), frozen.clone());
        Self { tensors, plan, share, groups, sizes: *sizes, frozen }
    }

    /// The tensors that are compared with a base.
    pub(super) fn state(&self) -> State<'_> {
        let Self { tensors, groups, sizes, frozen, .. } = self;
        State { tensors, groups, shard_size: sizes.shard, frozen }
    }
}

/// The start of the data in each file, and the length of the file.
fn files(plan: &Plan) -> Vec<(u64, u64)> {
    plan.shards.iter().map(|shard| (shard.header.len() as u64, shard.bytes)).collect()
}
