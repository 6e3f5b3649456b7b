//! The manifest, `fastckpt.json` (`docs/format.md`, 3): written, and read without trusting it.

use std::fmt;
use std::marker::PhantomData;

use safetensors::Dtype;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::format::checksum::{self, HEX};
use crate::format::geometry::{self, Placement};
use crate::format::layout::{self, Plan, TensorSpec};
pub use crate::format::limits::MAX_BYTES;
use crate::format::limits::{MAX_DIMENSIONS, MAX_OPTIONS, MAX_SHARDS, MAX_TENSORS};

/// The file's name.
pub const FILE: &str = "fastckpt.json";
/// The format version that this release writes and reads.
pub const VERSION: u64 = 1;
/// The newest minor version of the format that this release reads. One is added where a checkpoint may hold something
/// that a reader of the one before would misread.
pub const MINOR: u64 = 0;
/// The start of every manifest, up to the version.
pub const MAGIC: &[u8] = b"{\"fastckpt\":";

/// The start of its body: the first member, up to its value.
pub const MIN_READER: &[u8] = b"\"min_reader\":";

/// The checksum of a manifest as its first line has it, 16 digits: equal for equal manifests. `begin` is the manifest, or
/// its first 64 bytes.
#[must_use]
pub fn seal_of(begin: &[u8]) -> Option<&str> {
    let rest = begin.strip_prefix(MAGIC)?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let seal = rest[digits..].strip_prefix(b",\"crc64nvme\":\"")?.get(..HEX)?;
    checksum::from_hex(seal)?;
    std::str::from_utf8(seal).ok()
}

/// The manifest in the file, after the prefix.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Body {
    /// The least minor version that a reader must know, and the first member of the body.
    pub min_reader: u64,
    /// The program that wrote it.
    pub writer: Writer,
    /// When the save began, in seconds since 1970 UTC.
    pub created: f64,
    /// How it was written.
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
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
}

/// How a checkpoint was written.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Saved {
    /// The engine.
    pub engine: String,
    /// Why it is not the requested engine.
    pub fallback: Option<String>,
    /// Worker threads.
    pub threads: u64,
    /// Seconds up to the writing of the manifest.
    pub seconds: f64,
    /// GB/s over that time; 1 GB is 10^9 bytes.
    pub gigabytes_per_second: f64,
    /// The options of the call that are kept, by name, in words.
    #[serde(default, deserialize_with = "up_to::<_, _, MAX_OPTIONS>", skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<(String, String)>,
    /// The facts that vouch for the bytes of each shard when another save links it. Empty if it was not taken.
    #[serde(default, deserialize_with = "up_to::<_, _, MAX_SHARDS>", skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<Vouched>,
}

/// The facts that vouch for the bytes of a file that are not read before it is linked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vouched {
    /// The time of the file's last change, in nanoseconds since 1970 UTC, as its file system reported it when its bytes
    /// were last written or read.
    pub modified: i64,
    /// How many saves have linked it since it was written.
    pub links: u64,
    /// The number that its file system gives it, so that a copy with the file's time is not mistaken for it. 0 if
    /// unknown.
    #[serde(default)]
    pub inode: u64,
}

/// A shard in the manifest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ShardEntry {
    /// File name.
    pub file: String,
    /// The start of its tensors' names here, which its header omits.
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

/// A tensor in the manifest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Its name. The shard's header has it without the shard's prefix.
    pub name: String,
    /// Stored dtype.
    pub dtype: Dtype,
    /// Stored shape.
    #[serde(deserialize_with = "up_to::<_, _, MAX_DIMENSIONS>")]
    pub shape: Vec<u64>,
    /// Index of its shard.
    pub shard: usize,
    /// First byte in the file.
    pub offset: u64,
    /// CRCs of its extents, 16 digits each.
    pub crc: String,
    /// CRC-64/XZ of all its bytes; empty if it was not taken.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub crc64xz: String,
    /// Logical dtype and shape, if they differ from the stored ones.
    #[serde(rename = "as", default, skip_serializing_if = "Option::is_none")]
    pub logical: Option<Logical>,
}

/// The type of a tensor that safetensors cannot name.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Logical {
    /// Its dtype, `torch.complex128` or `numpy.>f8`.
    pub dtype: String,
    /// Its shape.
    #[serde(deserialize_with = "up_to::<_, _, MAX_DIMENSIONS>")]
    pub shape: Vec<u64>,
}

impl TensorEntry {
    /// Its size in bytes, which was checked when the manifest was read.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        layout::byte_size(self.dtype, &self.shape).unwrap_or(0)
    }

    /// Its place, as tensor number `tensor`.
    #[must_use]
    pub fn placement(&self, tensor: usize) -> Placement {
        Placement { tensor, offset: self.offset, bytes: self.bytes() }
    }

    /// The CRC of extent `index`.
    #[must_use]
    pub fn extent_crc(&self, index: u64) -> Option<u64> {
        let at = usize::try_from(index).ok()?.checked_mul(HEX)?;
        checksum::from_hex(self.crc.as_bytes().get(at..at.checked_add(HEX)?)?)
    }

    /// The CRC of all its bytes. It does not depend on their addresses.
    #[must_use]
    pub fn whole_crc(&self, block_size: u64) -> Option<u64> {
        let placement = self.placement(0);
        let first = geometry::down(self.offset, block_size);
        (0..geometry::extent_count(self.offset, placement.bytes, block_size)).try_fold(0, |crc, index| {
            let extent = geometry::extent(&placement, first + index * block_size, block_size)?;
            Some(checksum::combine(crc, self.extent_crc(index)?, extent.len))
        })
    }
}

/// A member that is present, even if it is `null`: that is not an array of tokens, and is refused as such.
fn present<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Option<Box<RawValue>>, D::Error> {
    Box::deserialize(deserializer).map(Some)
}

/// Reads an array and stops at the first element beyond the limit, not at the end of the array.
pub(super) fn up_to<'de, D: Deserializer<'de>, T: Deserialize<'de>, const MOST: usize>(
    deserializer: D,
) -> std::result::Result<Vec<T>, D::Error> {
    deserializer.deserialize_seq(Bounded::<_, MOST>(PhantomData))
}

struct Bounded<T, const MOST: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for Bounded<T, MOST> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array of at most {MOST} elements")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Vec<T>, A::Error> {
        let mut all = Vec::new();
        while let Some(element) = seq.next_element()? {
            if all.len() == MOST {
                return Err(serde::de::Error::invalid_length(MOST + 1, &self));
            }
            all.push(element);
        }
        Ok(all)
    }
}

/// The bytes of a manifest.
pub fn encode(body: &Body) -> Result<Vec<u8>> {
    let json =
        serde_json::to_vec(body).map_err(|e| Error::Invalid(format!("cannot write the manifest: {e}")))?;
    // The body's opening brace replaces that of the prefix.
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

/// How many bytes longer than expected a manifest may become, depending on the course of the save.
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
        "its manifest would take {bytes} bytes, more than the {most} of the format: {structure} for what is no \
         tensor, {metadata} for the metadata{}, the rest for {} tensors. Put long lists and texts into arrays, or \
         save it in parts",
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
pub(super) mod tests {
    use std::path::Path;

    use super::*;
    use crate::format::decode::decode;

    /// A manifest of one tensor.
    pub(in crate::format) fn body() -> Body {
        let raw = |text: &str| RawValue::from_string(text.to_owned()).unwrap();
        Body {
            min_reader: 0,
            writer: Writer { name: "fastckpt".to_owned(), version: "0.1.0".to_owned() },
            created: 1.5,
            saved: Saved {
                engine: "uring".to_owned(),
                fallback: None,
                threads: 2,
                seconds: 0.25,
                gigabytes_per_second: 1.0,
                options: Vec::new(),
                files: Vec::new(),
            },
            block_size: 4096,
            shards: vec![ShardEntry {
                file: "model.safetensors".to_owned(),
                prefix: String::new(),
                bytes: 4096 + 8,
                data_offset: 4096,
                header_crc: checksum::to_hex(1),
                crc: checksum::to_hex(2),
            }],
            tensors: vec![TensorEntry {
                name: "a".to_owned(),
                dtype: Dtype::F32,
                shape: vec![2],
                shard: 0,
                offset: 4096,
                crc: checksum::to_hex(3),
                crc64xz: String::new(),
                logical: None,
            }],
            structure: raw(r#"[["dict",1],"a",["tensor",0]]"#),
            metadata: raw("[null]"),
            per_rank: None,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let bytes = encode(&body()).unwrap();
        assert_eq!(&bytes[43..46], b"\",\n", "the prefix has 46 bytes");
        serde_json::from_slice::<serde_json::Value>(&bytes).unwrap();
        let read = decode(bytes.clone(), Path::new(FILE)).unwrap();
        assert_eq!(read.structure.get(), body().structure.get());
        assert_eq!(read.tensors[0].extent_crc(0), Some(3));
        assert_eq!(read.tensors[0].extent_crc(1), None);
        assert!(read.per_rank.is_none() && !String::from_utf8(bytes).unwrap().contains("per_rank"));
    }

    #[test]
    fn what_each_rank_has_for_itself_is_read_as_it_was_written() {
        let text = r#"[["list",2],7,["tensor",0]]"#;
        let per_rank = Some(RawValue::from_string(text.to_owned()).unwrap());
        let bytes = encode(&Body { per_rank, ..body() }).unwrap();
        assert_eq!(decode(bytes, Path::new(FILE)).unwrap().per_rank.unwrap().get(), text);
    }

    #[test]
    fn the_crc_of_a_tensor_does_not_depend_on_its_blocks() {
        let data: Vec<u8> = (0..=255).cycle().take(10_000).collect();
        for (offset, block_size) in [(4096, 4096), (100, 4096), (4095, 4096), (8192, 1 << 20), (1, 1 << 20)] {
            let mut entry =
                TensorEntry { dtype: Dtype::U8, shape: vec![10_000], offset, ..body().tensors.remove(0) };
            let place = entry.placement(0);
            let blocks = (0..=place.end() / block_size).map(|block| block * block_size);
            let extents = blocks.filter_map(|block| geometry::extent(&place, block, block_size));
            let crc = |e: geometry::Extent| checksum::of(&data[e.start as usize..(e.start + e.len) as usize]);
            entry.crc = extents.map(|extent| checksum::to_hex(crc(extent))).collect();
            assert_eq!(entry.whole_crc(block_size), Some(checksum::of(&data)));
            entry.crc.truncate(HEX * usize::from(offset + 10_000 > block_size));
            let cut = entry.whole_crc(block_size);
            assert!(cut.is_none(), "{cut:?}: an extent without a checksum");
        }
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let bytes = encode(&body()).unwrap();
        for at in 0..bytes.len() {
            for bit in 0..8 {
                let mut bad = bytes.clone();
                bad[at] ^= 1 << bit;
                assert!(decode(bad, Path::new(FILE)).is_err(), "bit {bit} of byte {at}");
            }
        }
    }

    #[test]
    fn another_version_is_told_apart_from_damage() {
        let bytes = String::from_utf8(encode(&body()).unwrap()).unwrap().replacen(":1,", ":12,", 1);
        let error = decode(bytes.into_bytes(), Path::new(FILE)).unwrap_err();
        assert!(matches!(error, Error::Version { why, .. } if why.contains("version 12,")));
        assert!(matches!(decode(b"{\"fastckpt\":".to_vec(), Path::new(FILE)), Err(Error::Corrupt { .. })));
    }

    #[test]
    fn a_manifest_says_which_reader_it_needs() {
        let needs = |min_reader| decode(encode(&Body { min_reader, ..body() }).unwrap(), Path::new(FILE));
        assert!(needs(MINOR).is_ok());
        let error = needs(MINOR + 1).unwrap_err();
        assert!(matches!(&error, Error::Version { .. }), "{error}");
        assert!(error.to_string().contains("needs a reader of format version 1.1"), "{error}");
        let error = decode(forged("\"min_reader\":0,", ""), Path::new(FILE)).unwrap_err();
        assert!(error.to_string().contains("before format version 1 was released"), "{error}");
        let error = decode(forged("\"min_reader\":0,", "\"min_reader\":-1,"), Path::new(FILE)).unwrap_err();
        assert!(matches!(&error, Error::Corrupt { .. }), "{error}");
    }

    /// The manifest with something in its place, under a checksum that fits.
    fn forged(from: &str, to: &str) -> Vec<u8> {
        let text = String::from_utf8(encode(&body()).unwrap()).unwrap().replacen(from, to, 1);
        let rest = text.split_once('\n').unwrap().1;
        let crc = checksum::to_hex(checksum::of(rest.as_bytes()));
        format!("{{\"fastckpt\":1,\"crc64nvme\":\"{crc}\",\n{rest}").into_bytes()
    }

    #[test]
    fn depth_bombs_in_unknown_members_are_harmless() {
        let deep = format!("\"bomb\":{}{},\"writer\"", "[".repeat(500_000), "]".repeat(500_000));
        let outcome = decode(forged("\"writer\"", &deep), Path::new(FILE));
        assert!(matches!(outcome, Ok(_) | Err(Error::Corrupt { .. })));
    }
}
