//! The manifest, `fastckpt.json`: written, and read with suspicion (`docs/format.md`, 3).

use std::collections::{BTreeMap, HashSet};
use std::fmt;
use std::marker::PhantomData;
use std::path::Path;

use safetensors::Dtype;
use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::value::RawValue;

use crate::error::{Error, Result};
use crate::format::checksum;
use crate::format::geometry::{self, PAGE};
use crate::format::layout::{self, MODEL, Plan, RESERVED_NAME, TensorSpec};
pub use crate::format::limits::MAX_BYTES;
use crate::format::limits::{
    MAX_BLOCK, MAX_DIMENSIONS, MAX_HEADER, MAX_SHARDS, MAX_TENSORS, MAX_TOKENS, MAX_VALUES,
};

/// The file's name.
pub const FILE: &str = "fastckpt.json";
/// The name of Hugging Face's index.
pub const INDEX_FILE: &str = "model.safetensors.index.json";
/// The format version that this release writes and reads.
pub const VERSION: u64 = 1;
/// What every manifest begins with, up to the version.
pub const MAGIC: &[u8] = b"{\"fastckpt\":";
/// Arrays in a structure nest no deeper: the array of tokens, a token, a list in it.
const TOKEN_DEPTH: usize = 3;

/// The manifest as it is in the file, after the prefix.
#[derive(Debug, Serialize, Deserialize)]
pub struct Body {
    /// Who wrote it.
    pub writer: Writer,
    /// Seconds since 1970 UTC when the save began.
    pub created: f64,
    /// How it was written.
    pub saved: Saved,
    /// Bytes of a block.
    pub block_size: u64,
    /// The files.
    #[serde(deserialize_with = "shards")]
    pub shards: Vec<ShardEntry>,
    /// The tensors.
    #[serde(deserialize_with = "tensors")]
    pub tensors: Vec<TensorEntry>,
    /// The state's structure, opaque here: an array of tokens.
    pub structure: Box<RawValue>,
    /// The caller's metadata, likewise.
    pub metadata: Box<RawValue>,
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
    /// Why not the one asked for.
    pub fallback: Option<String>,
    /// Worker threads.
    pub threads: u64,
    /// Seconds up to the writing of the manifest.
    pub seconds: f64,
    /// GB/s over that time, GB being 10^9 bytes.
    pub gigabytes_per_second: f64,
}

/// A shard in the manifest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ShardEntry {
    /// File name.
    pub file: String,
    /// What its tensors' names begin with here, and those in its header do not.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub prefix: String,
    /// Length of the file.
    pub bytes: u64,
    /// Where the data begins.
    pub data_offset: u64,
    /// CRC of what lies before.
    pub header_crc: String,
    /// CRC of the whole file.
    pub crc: String,
}

/// A tensor in the manifest.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Name in the shard's header.
    pub name: String,
    /// Stored dtype.
    pub dtype: Dtype,
    /// Stored shape.
    #[serde(deserialize_with = "shape")]
    pub shape: Vec<u64>,
    /// Index of its shard.
    pub shard: usize,
    /// First byte in the file.
    pub offset: u64,
    /// CRCs of its extents, 16 digits each.
    pub crc: String,
    /// True type, where it differs.
    #[serde(rename = "as", default, skip_serializing_if = "Option::is_none")]
    pub logical: Option<Logical>,
}

/// The type of a tensor that safetensors cannot name.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Logical {
    /// Its dtype, `torch.complex128` or `numpy.>f8`.
    pub dtype: String,
    /// Its shape.
    #[serde(deserialize_with = "shape")]
    pub shape: Vec<u64>,
}

impl TensorEntry {
    /// Its size in bytes. Checked when the manifest was read.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        layout::byte_size(self.dtype, &self.shape).unwrap_or(0)
    }

    /// The CRC of extent `index`.
    #[must_use]
    pub fn extent_crc(&self, index: u64) -> Option<u64> {
        let at = usize::try_from(index).ok()?.checked_mul(16)?;
        checksum::from_hex(self.crc.as_bytes().get(at..at.checked_add(16)?)?)
    }
}

fn shards<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<ShardEntry>, D::Error> {
    deserializer.deserialize_seq(Bounded::<_, MAX_SHARDS>(PhantomData))
}

fn tensors<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<TensorEntry>, D::Error> {
    deserializer.deserialize_seq(Bounded::<_, MAX_TENSORS>(PhantomData))
}

fn shape<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Vec<u64>, D::Error> {
    deserializer.deserialize_seq(Bounded::<_, MAX_DIMENSIONS>(PhantomData))
}

/// Reads an array and stops at its limit instead of after it.
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
    // The body's own opening brace becomes the prefix's.
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

/// A manifest may be that much longer than it was expected to be, in bytes: by how the save went.
const LEEWAY: u64 = 4096;

/// Refuses a state whose manifest would have more than `most` bytes, before anything is written. `expected` makes the manifest with
/// whatever checksums; it is asked only where `at_most`, a bound that costs little, does not settle it.
pub fn check_size(at_most: u64, most: u64, expected: impl FnOnce() -> Body) -> Result<()> {
    if at_most <= most {
        return Ok(());
    }
    let body = expected();
    let mut count = Count(LEEWAY);
    serde_json::to_writer(&mut count, &body)
        .map_err(|error| Error::Invalid(format!("cannot write the manifest: {error}")))?;
    if count.0 > most { Err(too_large(count.0, most, &body)) } else { Ok(()) }
}

/// No manifest of these tensors and texts is longer, in bytes.
#[must_use]
pub fn at_most(tensors: &[TensorSpec], plan: &Plan, structure: &str, metadata: &str) -> u64 {
    // JSON escapes a byte to at most six; numbers have at most 20 digits, and a comma each.
    let text = |text: &str| 6 * text.len() as u64;
    let numbers = |shape: &[u64]| 21 * shape.len() as u64;
    let tensors = tensors.iter().zip(&plan.places).map(|(tensor, &(_, offset))| {
        let extents = geometry::extent_count(offset, tensor.bytes().unwrap_or(0), plan.block_size);
        let truth = tensor.logical.as_ref();
        let truth = truth.map_or(0, |(dtype, shape)| 40 + text(dtype) + numbers(shape));
        160 + text(&tensor.name) + numbers(&tensor.shape) + 16 * extents + truth
    });
    let shards = plan.shards.iter().map(|shard| 200 + text(&shard.file) + text(&shard.prefix));
    tensors.chain(shards).sum::<u64>() + (structure.len() + metadata.len()) as u64 + 2 * LEEWAY
}

fn too_large(bytes: u64, most: u64, body: &Body) -> Error {
    let (structure, metadata) = (body.structure.get().len(), body.metadata.get().len());
    Error::TooLarge(format!(
        "its manifest would take {bytes} bytes, more than the {most} of the format: {structure} for what is no tensor, {metadata} for \
         the metadata, the rest for {} tensors. Put long lists and texts into arrays, or save it in parts",
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

/// Reads and checks the bytes of a manifest; `path` is for messages.
pub fn decode(mut bytes: Vec<u8>, path: &Path) -> Result<Body> {
    let corrupt = |what: String| Error::corrupt(path, what);
    let rest = bytes
        .strip_prefix(MAGIC)
        .ok_or_else(|| corrupt("it does not begin as a manifest of fastckpt does".to_owned()))?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let version = String::from_utf8_lossy(&rest[..digits.min(20)]).into_owned();
    if digits > 0 && version != VERSION.to_string() {
        return Err(Error::Version { path: path.to_path_buf(), found: version, known: VERSION });
    }
    let body = rest[digits..]
        .strip_prefix(b",\"crc64nvme\":\"")
        .and_then(|rest| rest.split_at_checked(16))
        .and_then(|(crc, rest)| Some((checksum::from_hex(crc)?, rest.strip_prefix(b"\",\n")?)));
    let Some((crc, body)) = body.filter(|_| digits > 0) else {
        return Err(corrupt("its first line is damaged".to_owned()));
    };
    let found = checksum::of(body);
    if found != crc {
        return Err(corrupt(format!(
            "its checksum is {}, written was {}",
            checksum::to_hex(found),
            checksum::to_hex(crc)
        )));
    }
    // The parser sees the object that the prefix opened: its brace takes the place of the newline before the body.
    let begin = bytes.len() - body.len() - 1;
    bytes[begin] = b'{';
    let text = std::str::from_utf8(&bytes[begin..]).map_err(|error| corrupt(error.to_string()))?;
    let body: Body = serde_json::from_str(text).map_err(|error| corrupt(error.to_string()))?;
    check(&body).map_err(corrupt)?;
    Ok(body)
}

/// Everything a manifest must hold beyond its JSON types (`docs/format.md`, 3.4).
fn check(body: &Body) -> std::result::Result<(), String> {
    let block = body.block_size;
    if !(PAGE..=MAX_BLOCK).contains(&block) || !geometry::is_aligned(block, PAGE) {
        return Err(format!("block_size {block} is no multiple of {PAGE} up to {MAX_BLOCK}"));
    }
    check_tokens("structure", body.structure.get())?;
    check_tokens("metadata", body.metadata.get())?;
    let mut files = HashSet::new();
    for shard in &body.shards {
        check_shard(shard)?;
        if !files.insert(shard.file.as_str()) {
            return Err(format!("shard `{}` is named twice", shard.file));
        }
    }
    let mut names = HashSet::with_capacity(body.tensors.len());
    let mut ranges: Vec<Vec<(u64, u64)>> = vec![Vec::new(); body.shards.len()];
    for tensor in &body.tensors {
        let name = &tensor.name;
        if name == RESERVED_NAME || !names.insert(name.as_str()) {
            return Err(format!("tensor name `{name}` is taken"));
        }
        let (from, to) = check_tensor(tensor, body).map_err(|what| format!("tensor `{name}`: {what}"))?;
        ranges[tensor.shard].push((from, to));
    }
    for (shard, mut ranges) in body.shards.iter().zip(ranges) {
        ranges.sort_unstable();
        let mut at = shard.data_offset;
        for (from, to) in ranges {
            if from != at {
                let what = if from < at { "overlap" } else { "leave a hole" };
                return Err(format!("tensors in shard `{}` {what} at byte {}", shard.file, from.min(at)));
            }
            at = to;
        }
        if at != shard.bytes {
            return Err(format!("tensors in shard `{}` end at byte {at} of {}", shard.file, shard.bytes));
        }
    }
    Ok(())
}

/// Whether a shard's own fields are possible.
fn check_shard(shard: &ShardEntry) -> std::result::Result<(), String> {
    let file = &shard.file;
    let stem = file.strip_suffix(".safetensors").unwrap_or_default();
    if stem.is_empty() || file.len() > 255 || file.contains(['/', '\\', '\0']) || file.starts_with('.') {
        return Err(format!("shard name `{}` is not a plain file name", file.escape_debug()));
    }
    if shard.bytes > i64::MAX as u64 || !(10..=shard.bytes.min(MAX_HEADER + 8)).contains(&shard.data_offset) {
        return Err(format!("shard `{file}` has impossible sizes"));
    }
    for crc in [&shard.header_crc, &shard.crc] {
        checksum::from_hex(crc.as_bytes()).ok_or_else(|| format!("shard `{file}` has no checksum"))?;
    }
    Ok(())
}

/// Whether a tensor's own fields are possible, and the bytes of the file that it takes.
fn check_tensor(tensor: &TensorEntry, body: &Body) -> std::result::Result<(u64, u64), String> {
    let shard = body.shards.get(tensor.shard).ok_or("its shard does not exist")?;
    let bytes = layout::byte_size(tensor.dtype, &tensor.shape).ok_or("impossible shape")?;
    let end = tensor.offset.checked_add(bytes).filter(|&end| end <= shard.bytes);
    let end = end.ok_or_else(|| format!("it ends beyond shard `{}`", shard.file))?;
    let name = tensor.name.strip_prefix(&shard.prefix);
    if !name.is_some_and(|name| !name.is_empty() && name != RESERVED_NAME) {
        return Err(format!("its name does not belong into shard `{}`", shard.file));
    }
    if tensor.offset < shard.data_offset {
        return Err(format!("it begins inside the header of shard `{}`", shard.file));
    }
    if tensor.logical.is_some() && (tensor.dtype != Dtype::U8 || tensor.shape.len() != 1) {
        return Err("only a vector of bytes can stand for another type".to_owned());
    }
    if tensor.logical.as_ref().is_some_and(|t| !t.dtype.bytes().all(|byte| byte.is_ascii_graphic())) {
        return Err("the name of its true dtype is none".to_owned());
    }
    let extents = geometry::extent_count(tensor.offset, bytes, body.block_size);
    let digits = tensor.crc.bytes().all(|d| matches!(d, b'0'..=b'9' | b'a'..=b'f'));
    if extents.checked_mul(16) != Some(tensor.crc.len() as u64) || !digits {
        return Err(format!("it needs the checksums of {extents} extents"));
    }
    Ok((tensor.offset, end))
}

/// Bounds an array of tokens before anybody parses it: how deep arrays nest, no objects, how many tokens and values there are.
pub fn check_tokens(what: &str, json: &str) -> std::result::Result<(), String> {
    let (mut depth, mut tokens, mut values, mut lists) = (0usize, 1usize, 1usize, 0usize);
    let (mut in_string, mut escaped) = (false, false);
    if !json.starts_with('[') {
        return Err(format!("{what} is not an array"));
    }
    for byte in json.bytes() {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'[' => {
                depth += 1;
                lists += usize::from(depth == TOKEN_DEPTH);
            }
            b']' => depth = depth.saturating_sub(1),
            b'{' => return Err(format!("{what} holds an object")),
            b',' => {
                if depth == 1 {
                    tokens += 1;
                    lists = 0;
                }
                values += 1;
            }
            _ => {}
        }
        if depth > TOKEN_DEPTH || tokens > MAX_TOKENS || values > MAX_VALUES {
            return Err(format!("{what} is deeper or longer than the format allows"));
        }
        if lists > 1 {
            return Err(format!("{what} holds a token of more than one list"));
        }
    }
    Ok(())
}

/// The bytes of Hugging Face's index: which shard holds which tensor of the model.
pub fn encode_index(body: &Body) -> Result<Vec<u8>> {
    let is_model = |shard: &ShardEntry| shard.file.starts_with(MODEL);
    let shards = body.shards.iter().filter(|shard| is_model(shard));
    let total: u64 = shards.map(|shard| shard.bytes - shard.data_offset).sum();
    let entries = body.tensors.iter().map(|tensor| (tensor, &body.shards[tensor.shard]));
    let weight_map: BTreeMap<&str, &str> = entries
        .filter(|(_, shard)| is_model(shard))
        .map(|(tensor, shard)| (&tensor.name[shard.prefix.len()..], shard.file.as_str()))
        .collect();
    let index = serde_json::json!({
        "metadata": {"total_size": total},
        "weight_map": weight_map,
    });
    serde_json::to_vec(&index).map_err(|error| Error::Invalid(format!("cannot write the index: {error}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body() -> Body {
        let raw = |text: &str| RawValue::from_string(text.to_owned()).unwrap();
        Body {
            writer: Writer { name: "fastckpt".to_owned(), version: "0.1.0".to_owned() },
            created: 1.5,
            saved: Saved {
                engine: "uring".to_owned(),
                fallback: None,
                threads: 2,
                seconds: 0.25,
                gigabytes_per_second: 1.0,
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
                logical: None,
            }],
            structure: raw(r#"[["dict",1],"a",["tensor",0]]"#),
            metadata: raw("[null]"),
        }
    }

    fn refusal(change: impl FnOnce(&mut Body)) -> String {
        let mut body = body();
        change(&mut body);
        let bytes = encode(&body).unwrap();
        decode(bytes.clone(), Path::new("fastckpt.json")).unwrap_err().to_string()
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
        assert!(matches!(error, Error::Version { found, .. } if found == "12"));
        assert!(matches!(decode(b"{\"fastckpt\":".to_vec(), Path::new(FILE)), Err(Error::Corrupt { .. })));
    }

    #[test]
    fn each_impossible_field_is_refused() {
        type Change = fn(&mut Body);
        let cases: Vec<(&str, Change)> = vec![
            ("block_size", |b| b.block_size = 0),
            ("block_size", |b| b.block_size = 4097),
            ("plain file name", |b| b.shards[0].file = "../model.safetensors".to_owned()),
            ("plain file name", |b| b.shards[0].file = "/model.safetensors".to_owned()),
            ("plain file name", |b| b.shards[0].file = ".safetensors".to_owned()),
            ("plain file name", |b| b.shards[0].file = "model.bin".to_owned()),
            ("twice", |b| b.shards.push(b.shards[0].clone())),
            ("impossible sizes", |b| b.shards[0].bytes = u64::MAX),
            ("impossible sizes", |b| b.shards[0].data_offset = 9),
            ("no checksum", |b| b.shards[0].crc = "xyz".to_owned()),
            ("taken", |b| b.tensors.push(b.tensors[0].clone())),
            ("taken", |b| b.tensors[0].name = RESERVED_NAME.to_owned()),
            ("does not exist", |b| b.tensors[0].shard = 1),
            ("beyond", |b| b.tensors[0].shape = vec![3]),
            ("beyond", |b| b.tensors[0].offset = u64::MAX),
            ("impossible shape", |b| b.tensors[0].shape = vec![1 << 62, 4]),
            ("at most 64", |b| b.tensors[0].shape = vec![1; 65]),
            ("does not belong", |b| b.shards[0].prefix = "model.".to_owned()),
            ("does not belong", |b| b.shards[0].prefix = "a".to_owned()),
            ("header", |b| b.tensors[0].offset = 4092),
            ("hole", |b| {
                b.tensors[0].offset = 4100;
                b.tensors[0].shape = vec![1];
            }),
            ("end at byte", |b| b.tensors[0].shape = vec![1]),
            ("checksums", |b| b.tensors[0].crc = String::new()),
            ("checksums", |b| b.tensors[0].crc = "Z".repeat(16)),
            ("vector of bytes", |b| {
                b.tensors[0].logical = Some(Logical { dtype: "torch.bits8".to_owned(), shape: vec![8] });
            }),
            ("true dtype", |b| {
                b.tensors[0].dtype = Dtype::U8;
                b.tensors[0].shape = vec![8];
                b.tensors[0].logical = Some(Logical { dtype: "torch.\x1b[2J".to_owned(), shape: vec![8] });
            }),
            ("object", |b| b.structure = RawValue::from_string("[{}]".to_owned()).unwrap()),
            ("deeper", |b| b.metadata = RawValue::from_string("[[[[]]]]".to_owned()).unwrap()),
            ("more than one list", |b| {
                b.metadata = RawValue::from_string(r#"[["size",[1],[]]]"#.to_owned()).unwrap();
            }),
            ("not an array", |b| b.metadata = RawValue::from_string("1".to_owned()).unwrap()),
        ];
        for (word, change) in cases {
            let refusal = refusal(change);
            assert!(refusal.contains(word), "{word}: {refusal}");
        }
        let overlap = refusal(|b| {
            let mut second = b.tensors[0].clone();
            second.name = "b".to_owned();
            second.offset += 4;
            second.shape = vec![1];
            b.tensors.push(second);
        });
        assert!(overlap.contains("overlap"), "{overlap}");
    }

    #[test]
    fn depth_bombs_in_unknown_members_are_harmless() {
        let deep = format!("\"bomb\":{}{},\"writer\"", "[".repeat(500_000), "]".repeat(500_000));
        let text = String::from_utf8(encode(&body()).unwrap()).unwrap().replacen("\"writer\"", &deep, 1);
        let rest = text.split_once('\n').unwrap().1;
        let crc = checksum::to_hex(checksum::of(rest.as_bytes()));
        let forged = format!("{{\"fastckpt\":1,\"crc64nvme\":\"{crc}\",\n{rest}");
        let outcome = decode(forged.into_bytes(), Path::new(FILE));
        assert!(matches!(outcome, Ok(_) | Err(Error::Corrupt { .. })));
    }
}
