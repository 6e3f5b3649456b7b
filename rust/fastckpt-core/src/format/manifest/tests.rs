use std::path::Path;

use safetensors::Dtype;

use super::*;
use crate::format::decode;

fn decode(bytes: Vec<u8>, path: &Path) -> Result<Body> {
    decode::decode(bytes.into(), path)
}

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
        tensors: vec![TensorEntry::from(Unpacked {
            name: "a".into(),
            dtype: Dtype::F32,
            shape: vec![2],
            shard: 0,
            offset: 4096,
            crc: checksum::to_hex(3).as_str().into(),
            crc64xz: "".into(),
            logical: None,
        })],
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
        let place = geometry::Placement { tensor: 0, offset, bytes: 10_000 };
        let blocks = (0..=place.end() / block_size).map(|block| block * block_size);
        let extents = blocks.filter_map(|block| geometry::extent(&place, block, block_size));
        let crc = |e: geometry::Extent| checksum::of(&data[e.start as usize..(e.start + e.len) as usize]);
        let crcs: String = extents.map(|extent| checksum::to_hex(crc(extent))).collect();
        let whole = |crcs: &str| {
            let [entry] = &body().tensors[..] else { unreachable!() };
            let (shape, crc) = (vec![10_000], crcs.into());
            let entry = Unpacked { dtype: Dtype::U8, shape, offset, crc, ..entry.unpacked() };
            TensorEntry::from(entry).whole_crc(block_size)
        };
        assert_eq!(whole(&crcs), Some(checksum::of(&data)));
        let cut = whole(&crcs[..HEX * usize::from(offset + 10_000 > block_size)]);
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

/// The manifest with a part replaced, and with a checksum that matches.
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
