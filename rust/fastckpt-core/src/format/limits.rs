//! The limits of the format (`docs/format.md`, 3.4): a reader refuses what exceeds them, and a writer refuses to begin.

/// The most bytes of a manifest.
pub const MAX_BYTES: u64 = 512 << 20;
/// The most tokens of a structure.
pub const MAX_TOKENS: usize = 1 << 25;
/// The most values in the tokens of a structure: tags, numbers, texts.
pub const MAX_VALUES: usize = 1 << 27;
/// The largest header that safetensors readers take, in bytes.
pub const MAX_HEADER: u64 = 100_000_000;
/// The most tensors of one checkpoint.
pub const MAX_TENSORS: usize = 1 << 22;
/// The most shards of one checkpoint.
pub const MAX_SHARDS: usize = 100_000;
/// The most dimensions of one tensor.
pub const MAX_DIMENSIONS: usize = 64;
/// The largest block, bytes.
pub const MAX_BLOCK: u64 = 64 << 20;
