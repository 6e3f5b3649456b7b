//! Hugging Face's index of the model's shards.

use std::collections::BTreeMap;

use crate::error::{Error, Result};
use crate::format::manifest::{Body, ShardEntry};

/// The name of the file.
pub const FILE: &str = "model.safetensors.index.json";

/// Encodes Hugging Face's index: which shard holds which tensor of the model.
pub fn encode(body: &Body) -> Result<Vec<u8>> {
    let is_model = |shard: &ShardEntry| !shard.file.contains('/');
    let shards = body.shards.iter().filter(|shard| is_model(shard));
    let total: u64 = shards.map(|shard| shard.bytes - shard.data_offset).sum();
    let entries = body.tensors.iter().map(|tensor| (tensor, &body.shards[tensor.shard()]));
    let weight_map: BTreeMap<&str, &str> = entries
        .filter(|(_, shard)| is_model(shard))
        .map(|(tensor, shard)| (&tensor.name()[shard.prefix.len()..], shard.file.as_str()))
        .collect();
    let index = serde_json::json!({
        "metadata": {"total_size": total},
        "weight_map": weight_map,
    });
    serde_json::to_vec(&index).map_err(|error| Error::Invalid(format!("cannot write the index: {error}")))
}
