//! The limits of the format (`docs/format.md`, 3.4). A reader refuses larger values, and a writer refuses to start.

/// The maximum size of a manifest, in bytes.
pub const MAX_BYTES: u64 = 512 << 20;
/// The maximum number of tokens in a structure.
pub const MAX_TOKENS: usize = 1 << 25;
/// The maximum number of values in the tokens of a structure: tags, numbers and texts.
pub const MAX_VALUES: usize = 1 << 27;
/// The largest header that safetensors readers accept, in bytes.
pub const MAX_HEADER: u64 = 100_000_000;
/// The maximum number of tensors in one checkpoint.
pub const MAX_TENSORS: usize = 1 << 22;
/// The maximum number of shards in one checkpoint.
pub const MAX_SHARDS: usize = 100_000;
/// The maximum number of options that a checkpoint records.
pub const MAX_OPTIONS: usize = 1024;
/// The maximum number of dimensions of one tensor.
pub const MAX_DIMENSIONS: usize = 64;
/// The largest block, in bytes.
pub const MAX_BLOCK: u64 = 64 << 20;
