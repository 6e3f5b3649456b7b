//! The manifest, `fastckpt.json` (`docs/format.md`, 3): written, and read without trusting it.

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::format::checksum::{self, HEX};
pub use crate::format::entry::{Logical, TensorEntry, Unpacked};
use crate::format::frugal::up_to;
use crate::format::geometry;
use crate::format::layout::{Plan, TensorSpec};
pub use crate::format::limits::MAX_BYTES;
use crate::format::limits::{MAX_OPTIONS, MAX_SHARDS, MAX_TENSORS};

/// The name of the file.
pub const FILE: &str = "fastckpt.json";
/// The format version that this release writes and reads.
pub const VERSION: u64 = 1;
/// The newest minor version of the format that this release reads. It is raised when a checkpoint may hold something
/// that readers of the previous version would misread.
pub const MINOR: u64 = 0;
/// The start of every manifest, up to the version.
pub const MAGIC: &[u8] = b"{\"fastckpt\":";

/// The start of the body: the first member, up to its value.
pub const MIN_READER: &[u8] = b"\"min_reader\":";

/// The checksum of a manifest as its first line has it, 16 digits. Equal manifests have equal checksums. `begin` is the
/// manifest, or its first 64 bytes.
#[must_use]
pub fn seal_of(begin: &[u8]) -> Option<&str> {
    let rest = begin.strip_prefix(MAGIC)?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let seal = rest[digits..].strip_prefix(b",\"crc64nvme\":\"")?.get(..HEX)?;
    checksum::from_hex(seal)?;
    std::str::from_utf8(seal).ok()
}

/// The body of a manifest: the part of the file after the prefix.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Body {
    /// The lowest minor version that a reader must support. It is the first member of the body.
    pub min_reader: u64,
    /// The program that wrote the checkpoint.
    pub writer: Writer,
    /// When the save began, in seconds since 1970 UTC.
    pub created: f64,
    /// How the checkpoint was written.
    pub saved: Saved,
    /// Size of a block in bytes.
    pub block_size: u64,
    /// The files.
    #[serde(deserialize_with = "up_to::<_, _, MAX_SHARDS>")]
    pub shards: Vec<ShardEntry>,
    /// The tensors.
    #[serde(deserialize_with = "up_to::<_, _, MAX_TENSORS>")]
    pub tensors: Vec<TensorEntry>,
    /// The structure of the state, opaque here: an array of tokens.
    pub structure: Box<RawValue>,
    /// The caller's metadata, also an opaque array of tokens.
    pub metadata: Box<RawValue>,
    /// The states that ranks of the job saved for themselves, also an opaque array of tokens.
    #[serde(default, deserialize_with = "present", skip_serializing_if = "Option::is_none")]
    pub per_rank: Option<Box<RawValue>>,
}

/// The program that wrote a checkpoint.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Writer {
    /// The name of the program.
    pub name: String,
    /// The version of the program.
    pub version: String,
}

/// How a checkpoint was written.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Saved {
    /// The engine.
    pub engine: String,
    /// Why the engine is not the requested one.
    pub fallback: Option<String>,
    /// Worker threads.
    pub threads: u64,
    /// Seconds up to the writing of the manifest.
    pub seconds: f64,
    /// GB/s over that time; 1 GB is 10^9 bytes.
    pub gigabytes_per_second: f64,
    /// The options of the call that the checkpoint records: names and texts.
    #[serde(default, deserialize_with = "up_to::<_, _, MAX_OPTIONS>", skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<(String, String)>,
    /// For each shard, the facts on which another save relies when it links the shard. Empty if they were not recorded.
    #[serde(default, deserialize_with = "up_to::<_, _, MAX_SHARDS>", skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<Vouched>,
}

/// The facts by which a save trusts the bytes of a file that it links without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vouched {
    /// The time of the file's last change, in nanoseconds since 1970 UTC, as its file system reported it when its bytes
    /// were last written or read.
    pub modified: i64,
    /// How many saves have linked the file since it was written.
    pub links: u64,
    /// The file's number in its file system, so that a copy with the same time is not mistaken for the file. 0 if
    /// unknown.
    #[serde(default)]
    pub inode: u64,
}

/// A shard in the manifest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ShardEntry {
    /// File name.
    pub file: String,
    /// The prefix that its tensors' names have here, and that its header omits.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub prefix: String,
    /// Length of the file.
    pub bytes: u64,
    /// Where the data starts.
    pub data_offset: u64,
    /// CRC of everything before the data.
    pub header_crc: String,
    /// CRC of the whole file.
    pub crc: String,
}

/// A member that is present, even as `null`: that is refused later, because it is not an array of tokens.
fn present<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Option<Box<RawValue>>, D::Error> {
    Box::deserialize(deserializer).map(Some)
}

/// The bytes of a manifest.
pub fn encode(body: &Body) -> Result<Vec<u8>> {
    let json =
        serde_json::to_vec(body).map_err(|e| Error::Invalid(format!("cannot write the manifest: {e}")))?;
    // The opening brace of the prefix replaces the opening brace of the body.
    let mut rest = json.get(1..).unwrap_or_default().to_vec();
    rest.push(b'\n');
    let crc = checksum::to_hex(checksum::of(&rest));
    let mut all = format!("{{\"fastckpt\":{VERSION},\"crc64nvme\":\"{crc}\",\n").into_bytes();
    all.append(&mut rest);
    if all.len() as u64 > MAX_BYTES {
        return Err(too_large(all.len() as u64, MAX_BYTES, body));
    }
    Ok(all)
}

/// By how many bytes a manifest may become longer than expected, depending on the course of the save.
const LEEWAY: u64 = 4096;

/// Refuses a state whose manifest would have more than `most` bytes, before anything is written. `body` is the manifest
/// with arbitrary checksums.
pub fn check_size(body: &Body, most: u64) -> Result<()> {
    let mut count = Count(LEEWAY);
    serde_json::to_writer(&mut count, body)
        .map_err(|error| Error::Invalid(format!("cannot write the manifest: {error}")))?;
    if count.0 > most { Err(too_large(count.0, most, body)) } else { Ok(()) }
}

/// An upper bound for the size of a manifest of these tensors and texts (structure, metadata and the states of ranks
/// alone), in bytes.
#[must_use]
pub fn at_most(tensors: &[TensorSpec], plan: &Plan, texts: [&str; 3]) -> u64 {
    // JSON escapes a byte to at most six. Numbers have at most 20 digits and a comma each.
    let text = |text: &str| 6 * text.len() as u64;
    let numbers = |shape: &[u64]| 21 * shape.len() as u64;
    let tensors = tensors.iter().zip(&plan.places).map(|(tensor, &(_, offset))| {
        let extents = geometry::extent_count(offset, tensor.bytes().unwrap_or(0), plan.block_size);
        let logical = tensor.logical.as_ref();
        let logical = logical.map_or(0, |(dtype, shape)| 40 + text(dtype) + numbers(shape));
        190 + text(&tensor.name) + numbers(&tensor.shape) + HEX as u64 * extents + logical
    });
    let shards = plan.shards.iter().map(|shard| 270 + text(&shard.file) + text(&shard.prefix));
    tensors.chain(shards).sum::<u64>() + texts.iter().map(|text| text.len() as u64).sum::<u64>() + 2 * LEEWAY
}

/// Refuses more options than a checkpoint keeps.
pub fn check_options(options: &[(String, String)]) -> Result<()> {
    let count = options.len();
    let many = || format!("{count} options, more than the {MAX_OPTIONS} that it may keep: keep fewer");
    if count > MAX_OPTIONS { Err(Error::TooLarge(many())) } else { Ok(()) }
}

fn too_large(bytes: u64, most: u64, body: &Body) -> Error {
    let (structure, metadata) = (body.structure.get().len(), body.metadata.get().len());
    let per_rank = body.per_rank.as_ref().map(|text| format!(", {} for `per_rank`", text.get().len()));
    Error::TooLarge(format!(
        "its manifest would take {bytes} bytes, more than the {most} of the format: {structure} for values \
         other than tensors, {metadata} for the metadata{}, the rest for {} tensors. Put long lists and texts into \
         arrays, or save the state in parts",
        per_rank.unwrap_or_default(),
        body.tensors.len()
    ))
}

/// Counts bytes instead of keeping them.
struct Count(u64);

impl std::io::Write for Count {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0 += bytes.len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests;
