//! Reads a manifest without trusting it: version, checksum, JSON, and further rules (`docs/format.md`, 3).

use std::borrow::Cow;
use std::collections::HashSet;
use std::hash::{BuildHasher, RandomState};
use std::path::Path;

use safetensors::Dtype;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Deserializer;

use crate::error::{Error, Result};

use crate::format::checksum::{self, HEX};
use crate::format::frugal::{Frugal, quoted, up_to};
use crate::format::geometry::{self, PAGE};
use crate::format::groups::{RESERVED_NAME, TRAINING, plain_name};
use crate::format::limits::{MAX_BLOCK, MAX_HEADER, MAX_SHARDS};
use crate::format::manifest::{Body, MAGIC, MIN_READER, MINOR, ShardEntry, TensorEntry, VERSION};
use crate::format::tokens;

/// Reads and checks the bytes of a manifest. They are dropped before the check. `path` is for messages.
pub fn decode(bytes: Cow<'_, [u8]>, path: &Path) -> Result<Body> {
    let body = parse(&bytes, path)?;
    drop(bytes);
    check(&body).map_err(|what| Error::corrupt(path, what))?;
    Ok(body)
}

/// The part of a manifest that a list of checkpoints needs.
#[derive(Debug, Deserialize)]
pub struct Head {
    /// When the save began, in seconds since 1970 UTC.
    pub created: f64,
    /// The files.
    #[serde(deserialize_with = "up_to::<_, _, MAX_SHARDS>")]
    pub shards: Vec<ShardEntry>,
}

/// Reads the head of a manifest. Checks its checksum and its shards, but not its tensors.
pub fn decode_head(bytes: &[u8], path: &Path) -> Result<Head> {
    let head: Head = parse(bytes, path)?;
    head.shards.iter().try_for_each(check_shard).map_err(|what| Error::corrupt(path, what))?;
    Ok(head)
}

/// Checks version and checksum, and parses the rest as JSON.
fn parse<T: DeserializeOwned>(bytes: &[u8], path: &Path) -> Result<T> {
    let corrupt = |what: String| Error::corrupt(path, what);
    let rest = bytes
        .strip_prefix(MAGIC)
        .ok_or_else(|| corrupt("it does not begin as a manifest of fastckpt does".to_owned()))?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    let version = String::from_utf8_lossy(&rest[..digits.min(20)]).into_owned();
    let unread = |why: String| Error::Version { path: path.to_path_buf(), why };
    if digits > 0 && version != VERSION.to_string() {
        return Err(unread(format!(
            "has format version {version}, and this fastckpt reads version {VERSION}: {UPGRADE}"
        )));
    }
    let body = rest[digits..]
        .strip_prefix(b",\"crc64nvme\":\"")
        .and_then(|rest| rest.split_at_checked(HEX))
        .and_then(|(crc, rest)| Some((checksum::from_hex(crc)?, rest.strip_prefix(b"\",\n")?)));
    let Some((crc, body)) = body.filter(|_| digits > 0) else {
        return Err(corrupt("its first line is damaged".to_owned()));
    };
    let found = checksum::of(body);
    if found != crc {
        return Err(corrupt(format!(
            "its checksum is {}, expected {}",
            checksum::to_hex(found),
            checksum::to_hex(crc)
        )));
    }
    match min_reader(body) {
        None if body.starts_with(b"\"writer\":") => return Err(unread(EARLIER.to_owned())),
        None => return Err(corrupt("it does not begin with the reader version that it needs".to_owned())),
        Some(minor) if minor > MINOR => {
            return Err(unread(format!(
                "needs a reader of format version {VERSION}.{minor}, and this fastckpt reads up to {VERSION}.{MINOR}: \
                 {UPGRADE}"
            )));
        }
        Some(_) => {}
    }
    // The prefix contains the opening brace of the object. The parser ignores the two members of the prefix as unknown.
    let text = std::str::from_utf8(bytes).map_err(|error| corrupt(error.to_string()))?;
    let mut json = Deserializer::from_str(text);
    let parsed = T::deserialize(Frugal(&mut json)).and_then(|parsed| json.end().map(|()| parsed));
    parsed.map_err(|error| corrupt(error.to_string()))
}

/// What to do about a newer checkpoint.
const UPGRADE: &str = "upgrade the package fastckpt-io";
/// The error for a manifest whose first member is its writer.
const EARLIER: &str = "was written before format version 1 was released, when the training state lay beside the \
    model: load it with the fastckpt that wrote it";

/// The reader version that the first member of the body requires; `None` if there is no such member.
fn min_reader(body: &[u8]) -> Option<u64> {
    let rest = body.strip_prefix(MIN_READER)?;
    let digits = rest.iter().take_while(|byte| byte.is_ascii_digit()).count();
    // If the value is not a number, the parser refuses it later.
    Some(std::str::from_utf8(&rest[..digits]).ok().and_then(|digits| digits.parse().ok()).unwrap_or(0))
}

/// Refuses a manifest that no save could have written, and returns the reason.
pub fn check(body: &Body) -> std::result::Result<(), String> {
    let block = body.block_size;
    if !(PAGE..=MAX_BLOCK).contains(&block) || !block.is_multiple_of(PAGE) {
        return Err(format!("block_size {block} is not a multiple of {PAGE} up to {MAX_BLOCK}"));
    }
    let Body { created, saved, .. } = body;
    if ![*created, saved.seconds, saved.gigabytes_per_second].iter().all(|number| number.is_finite()) {
        return Err("a time in it is not a number".to_owned());
    }
    tokens::check("structure", body.structure.get())?;
    tokens::check("metadata", body.metadata.get())?;
    body.per_rank.as_ref().map_or(Ok(()), |text| tokens::check("per_rank", text.get()))?;
    let mut files = HashSet::new();
    for shard in &body.shards {
        check_shard(shard)?;
        if !files.insert(shard.file.as_str()) {
            return Err(format!("shard `{}` is named twice", shard.file));
        }
    }
    check_names(&body.tensors)?;
    let mut ranges: Vec<Vec<(u64, u64)>> = vec![Vec::new(); body.shards.len()];
    for tensor in &body.tensors {
        let checked = check_tensor(tensor, body);
        let (from, to) = checked.map_err(|what| format!("tensor `{}`: {what}", quoted(tensor.name())))?;
        ranges[tensor.shard()].push((from, to));
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

/// Checks that all tensors have different names. Hashes of names take less memory than a set of names.
fn check_names(tensors: &[TensorEntry]) -> std::result::Result<(), String> {
    let (hasher, name) = (RandomState::new(), |index: usize| tensors[index].name());
    let mut order: Vec<_> = (0..tensors.len()).map(|index| (hasher.hash_one(name(index)), index)).collect();
    order.sort_unstable_by(|one, other| one.0.cmp(&other.0).then_with(|| name(one.1).cmp(name(other.1))));
    let twice = order.windows(2).find(|two| two[0].0 == two[1].0 && name(two[0].1) == name(two[1].1));
    let mut reserved = (0..tensors.len()).filter(|&index| name(index) == RESERVED_NAME);
    let wrong = twice.map(|two| (two[0].1, "appears twice"));
    let wrong = wrong.or_else(|| Some((reserved.next()?, "is reserved")));
    wrong.map_or(Ok(()), |(index, why)| Err(format!("tensor name `{}` {why}", quoted(name(index)))))
}

/// Checks whether a shard's own fields are possible.
fn check_shard(shard: &ShardEntry) -> std::result::Result<(), String> {
    let file = &shard.file;
    if !plain_name(file).is_some_and(|plain| plain.ends_with(".safetensors")) {
        return Err(format!(
            "shard name `{}` is not a plain file name, nor one in `{TRAINING}`",
            quoted(file).escape_debug()
        ));
    }
    if shard.bytes > i64::MAX as u64 || !(10..=shard.bytes.min(MAX_HEADER + 8)).contains(&shard.data_offset) {
        return Err(format!("shard `{file}` has impossible sizes"));
    }
    for crc in [&shard.header_crc, &shard.crc] {
        checksum::from_hex(crc.as_bytes()).ok_or_else(|| format!("shard `{file}` has no checksum"))?;
    }
    Ok(())
}

/// Checks whether a tensor's own fields are possible, and returns its byte range in the file.
fn check_tensor(tensor: &TensorEntry, body: &Body) -> std::result::Result<(u64, u64), String> {
    let shard = body.shards.get(tensor.shard()).ok_or("its shard is not listed")?;
    let bytes = tensor.checked_bytes().ok_or("impossible shape")?;
    let end = tensor.offset.checked_add(bytes).filter(|&end| end <= shard.bytes);
    let end = end.ok_or_else(|| format!("it ends beyond shard `{}`", shard.file))?;
    if tensor.name().strip_prefix(&shard.prefix).is_none_or(|name| name == RESERVED_NAME) {
        return Err(format!("its name does not belong in shard `{}`", shard.file));
    }
    if tensor.offset < shard.data_offset {
        return Err(format!("it begins inside the header of shard `{}`", shard.file));
    }
    let logical = tensor.logical();
    if logical.is_some() && (tensor.dtype != Dtype::U8 || tensor.shape().len() != 1) {
        return Err("only a vector of bytes can stand for another type".to_owned());
    }
    if logical.is_some_and(|(dtype, _)| !dtype.bytes().all(|byte| byte.is_ascii_graphic())) {
        return Err("the name of its logical dtype is not printable ASCII".to_owned());
    }
    let extents = geometry::extent_count(tensor.offset, bytes, body.block_size);
    let digits = tensor.crc().bytes().all(|d| matches!(d, b'0'..=b'9' | b'a'..=b'f'));
    if extents.checked_mul(HEX as u64) != Some(tensor.crc().len() as u64) || !digits {
        return Err(format!("it needs the checksums of {extents} extents"));
    }
    Ok((tensor.offset, end))
}

#[cfg(test)]
mod tests {
    use serde_json::value::RawValue;

    use super::*;
    use crate::format::manifest::tests::body;
    use crate::format::manifest::{FILE, Logical, Unpacked, encode};

    fn refusal(change: impl FnOnce(&mut Body)) -> String {
        let mut body = body();
        change(&mut body);
        decode(encode(&body).unwrap().into(), Path::new(FILE)).unwrap_err().to_string()
    }

    fn tensor(body: &mut Body, change: fn(&mut Unpacked<'_>)) {
        let entry = body.tensors.remove(0);
        let mut tensor = entry.unpacked();
        change(&mut tensor);
        body.tensors.insert(0, tensor.into());
    }

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table of cases")]
    fn each_impossible_field_is_refused() {
        type Change = fn(&mut Body);
        let cases: Vec<(&str, Change)> = vec![
            ("block_size", |b| b.block_size = 0),
            ("block_size", |b| b.block_size = 4097),
            ("plain file name", |b| b.shards[0].file = "../model.safetensors".to_owned()),
            ("plain file name", |b| b.shards[0].file = "/model.safetensors".to_owned()),
            ("plain file name", |b| b.shards[0].file = ".safetensors".to_owned()),
            ("plain file name", |b| b.shards[0].file = "model.bin".to_owned()),
            ("plain file name", |b| b.shards[0].file = "training/../model.safetensors".to_owned()),
            ("plain file name", |b| b.shards[0].file = "training/a/b.safetensors".to_owned()),
            ("plain file name", |b| b.shards[0].file = "training/.safetensors".to_owned()),
            ("plain file name", |b| b.shards[0].file = "model/model.safetensors".to_owned()),
            ("twice", |b| b.shards.push(b.shards[0].clone())),
            ("impossible sizes", |b| b.shards[0].bytes = u64::MAX),
            ("impossible sizes", |b| b.shards[0].data_offset = 9),
            ("no checksum", |b| b.shards[0].crc = "xyz".to_owned()),
            ("twice", |b| b.tensors.push(b.tensors[0].clone())),
            ("reserved", |b| tensor(b, |t| t.name = RESERVED_NAME.into())),
            ("is not listed", |b| tensor(b, |t| t.shard = 1)),
            ("is not listed", |b| tensor(b, |t| t.shard = 1 << 32)),
            ("beyond", |b| tensor(b, |t| t.shape = vec![3])),
            ("beyond", |b| b.tensors[0].offset = u64::MAX),
            ("impossible shape", |b| tensor(b, |t| t.shape = vec![1 << 62, 4])),
            ("at most 64", |b| tensor(b, |t| t.shape = vec![1; 65])),
            ("does not belong", |b| b.shards[0].prefix = "model.".to_owned()),
            ("does not belong", |b| {
                b.shards[0].prefix = "a.".to_owned();
                tensor(b, |t| t.name = "a.__metadata__".into());
            }),
            ("header", |b| b.tensors[0].offset = 4092),
            ("hole", |b| {
                b.tensors[0].offset = 4100;
                tensor(b, |t| t.shape = vec![1]);
            }),
            ("end at byte", |b| tensor(b, |t| t.shape = vec![1])),
            ("checksums", |b| tensor(b, |t| t.crc = "".into())),
            ("checksums", |b| tensor(b, |t| t.crc = "ZZZZZZZZZZZZZZZZ".into())),
            ("vector of bytes", |b| {
                tensor(b, |t| t.logical = Some(Logical { dtype: "torch.bits8".into(), shape: vec![8] }));
            }),
            ("logical dtype", |b| {
                b.tensors[0].dtype = Dtype::U8;
                tensor(b, |t| {
                    t.shape = vec![8];
                    t.logical = Some(Logical { dtype: "torch.\x1b[2J".into(), shape: vec![8] });
                });
            }),
            ("object", |b| b.structure = RawValue::from_string("[{}]".to_owned()).unwrap()),
            ("deeper", |b| b.metadata = RawValue::from_string("[[[[]]]]".to_owned()).unwrap()),
            ("more than one list", |b| {
                b.metadata = RawValue::from_string(r#"[["size",[1],[]]]"#.to_owned()).unwrap();
            }),
            ("not an array", |b| b.metadata = RawValue::from_string("1".to_owned()).unwrap()),
            ("per_rank is not an array", |b| {
                b.per_rank = Some(RawValue::from_string("null".to_owned()).unwrap());
            }),
            ("per_rank holds an object", |b| {
                b.per_rank = Some(RawValue::from_string("[{}]".to_owned()).unwrap());
            }),
        ];
        for (word, change) in cases {
            let refusal = refusal(change);
            assert!(refusal.contains(word), "{word}: {refusal}");
        }
        let overlap = refusal(|b| {
            b.tensors.push(b.tensors[0].clone());
            tensor(b, |t| {
                t.name = "b".into();
                t.offset += 4;
                t.shape = vec![1];
            });
        });
        assert!(overlap.contains("overlap"), "{overlap}");
    }
}
