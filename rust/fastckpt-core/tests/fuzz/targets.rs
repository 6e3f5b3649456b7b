//! The targets of fuzzing. A target makes inputs of the core from any bytes, and compares the core's results with those
//! of another method. A panic is a finding. Two programs run the targets: the test beside this file, on kept inputs and
//! a few mutations, and libFuzzer (`rust/fuzz`, `scripts/fuzz`).

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use arbitrary::{Result, Unstructured};
use fastckpt_core::format::checksum::{self, Pair};
use fastckpt_core::format::decode::{decode, decode_head};
use fastckpt_core::format::geometry::{self, PAGE};
use fastckpt_core::format::groups::{self, Group};
use fastckpt_core::format::layout::{self, Plan, Reuse, Sizes, TensorSpec};
use fastckpt_core::format::manifest::{
    self, Body, FILE, Logical, Saved, ShardEntry, TensorEntry, Unpacked, Writer,
};
use fastckpt_core::format::{index, tokens};
use fastckpt_core::ranks::{Sums, pieces};
use fastckpt_core::share::{Duties, Message, Piece, Placement, Purpose, Share, Spread, Tensor};
use peak_alloc::PeakAlloc;
use safetensors::Dtype;
use safetensors::tensor::Metadata;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;

/// Measures the memory of this program.
#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;
/// The number of bytes that a read may use beyond twice its input.
const ROOM: usize = 64 << 20;

/// A fuzz target. See the module.
pub(crate) struct Target {
    /// The name of the target on the command line.
    pub(crate) name: &'static str,
    /// Panics if a guarantee is violated.
    pub(crate) run: fn(&[u8]),
    /// The first inputs.
    seeds: fn() -> Vec<Vec<u8>>,
}

/// All targets.
pub(crate) const TARGETS: [Target; 5] = [
    Target { name: "header", run: header, seeds: drawn },
    Target { name: "manifest", run: manifest, seeds: manifests },
    Target { name: "messages", run: messages, seeds: drawn },
    Target { name: "plan", run: plan, seeds: drawn },
    Target { name: "tokens", run: tokens, seeds: texts },
];

impl Target {
    /// The first inputs, and inputs that once violated a guarantee (in `found.txt`, smallest first).
    pub(crate) fn seeds(&self) -> Vec<Vec<u8>> {
        let lines = include_str!("found.txt").lines().filter_map(|line| line.split_once(' '));
        let mine = lines.filter(|(target, _)| *target == self.name);
        (self.seeds)().into_iter().chain(mine.map(|(_, hex)| from_hex(hex))).collect()
    }
}

fn from_hex(hex: &str) -> Vec<u8> {
    let pairs = hex.trim().as_bytes().chunks(2);
    let digit = |byte: u8| char::from(byte).to_digit(16).expect("hexadecimal") as u8;
    pairs.map(|pair| pair.iter().fold(0, |all, &byte| all << 4 | digit(byte))).collect()
}

/// Numbers that look random, and are the same each time.
pub(crate) struct Draw(pub(crate) u64);

impl Draw {
    /// The next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed ^ mixed >> 27
    }

    /// A number below `end`.
    pub(crate) fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }
}

/// Byte strings for targets that make their input from bytes.
fn drawn() -> Vec<Vec<u8>> {
    let bytes = |seed| {
        let mut draw = Draw(seed);
        // Most bytes are small numbers, which are the meaningful ones.
        (0..256).map(|_| (draw.next() % [8, 8, 8, 256][draw.below(4)]) as u8).collect()
    };
    (0..24).map(bytes).collect()
}

// --- the manifest -----------------------------------------------------------------------------------------------------

/// Puts a first line with the right checksum before a text.
fn sealed(rest: &[u8]) -> Vec<u8> {
    let crc = checksum::to_hex(checksum::of(rest));
    let mut all = format!("{{\"fastckpt\":{},\"crc64nvme\":\"{crc}\",\n", manifest::VERSION).into_bytes();
    all.extend(rest);
    all
}

/// The result of `action`, and the most bytes that it held at a time.
pub(crate) fn measured<T>(action: impl FnOnce() -> T) -> (T, usize) {
    MEMORY.reset_peak_usage();
    let before = MEMORY.current_usage();
    let done = action();
    (done, MEMORY.peak_usage().saturating_sub(before))
}

/// Reads a manifest. An accepted manifest obeys the format, and stays the same when it is written and read again.
fn manifest(data: &[u8]) {
    let (path, bytes) = (Path::new(FILE), sealed(data));
    let given = bytes.clone();
    let (outcome, most) = measured(|| decode(given.into(), path));
    assert!(most <= 2 * bytes.len() + ROOM, "{most} bytes for {} of a manifest", bytes.len());
    let head = decode_head(&bytes, path);
    let body = match outcome {
        Ok(body) => body,
        Err(error) => return assert!(error.to_string().contains(FILE), "{error}"),
    };
    let head = head.expect("the head of a sound manifest");
    assert_eq!(head.created.to_bits(), body.created.to_bits());
    let files = |shards: &[ShardEntry]| shards.iter().map(|shard| shard.file.clone()).collect::<Vec<_>>();
    assert_eq!(files(&head.shards), files(&body.shards));
    serde_json::from_slice::<IgnoredAny>(&bytes).expect("JSON");
    sound(&body);
    let again = manifest::encode(&body).expect("it fits");
    let read = decode((&again).into(), path).expect("what was written");
    assert!(manifest::encode(&read).expect("it fits") == again, "it changes when it is read");
}

/// The rules of `docs/format.md`, section 3, byte by byte, independent of the core's checks.
fn sound(body: &Body) {
    assert!(body.block_size > 0 && body.block_size.is_multiple_of(PAGE));
    let names: BTreeSet<_> = body.tensors.iter().map(TensorEntry::name).collect();
    assert_eq!(names.len(), body.tensors.len());
    let files: BTreeSet<_> = body.shards.iter().map(|shard| &shard.file).collect();
    assert_eq!(files.len(), body.shards.len());
    for (number, shard) in body.shards.iter().enumerate() {
        let parts: Vec<_> = Path::new(&shard.file).components().collect();
        let plain = parts.iter().all(|part| matches!(part, std::path::Component::Normal(_)));
        assert!(plain && (parts.len() == 1 || parts.len() == 2 && shard.file.starts_with("training/")));
        let mut ranges: Vec<_> = body.tensors.iter().filter(|tensor| tensor.shard() == number).collect();
        ranges.sort_by_key(|tensor| (tensor.offset, tensor.bytes()));
        let end = ranges.iter().fold(shard.data_offset, |at, tensor| {
            assert_eq!(tensor.offset, at, "{}", tensor.name());
            at + tensor.bytes()
        });
        assert_eq!(end, shard.bytes);
    }
    for tensor in &body.tensors {
        assert!(tensor.name().starts_with(&body.shards[tensor.shard()].prefix));
        assert!(tensor.whole_crc(body.block_size).is_some());
    }
    let index: Value = serde_json::from_slice(&index::encode(body).expect("an index")).expect("JSON");
    let model = body.tensors.iter().filter(|tensor| !body.shards[tensor.shard()].file.contains('/'));
    let short: BTreeSet<_> = model.map(|one| &one.name()[body.shards[one.shard()].prefix.len()..]).collect();
    assert_eq!(index["weight_map"].as_object().map(serde_json::Map::len), Some(short.len()));
}

fn raw(text: &str) -> Box<RawValue> {
    RawValue::from_string(text.to_owned()).expect("JSON")
}

/// Whether there is enough memory for the checksums of all extents.
fn is_small(plan: &Plan) -> bool {
    plan.shards.iter().all(|shard| shard.bytes < 1 << 24)
}

/// The manifest of a plan, with arbitrary checksums.
fn body(specs: &[TensorSpec], plan: &Plan) -> Body {
    let shard = |shard: &layout::Shard| ShardEntry {
        file: shard.file.clone(),
        prefix: shard.prefix.clone(),
        bytes: shard.bytes,
        data_offset: shard.header.len() as u64,
        header_crc: checksum::to_hex(checksum::of(&shard.header)),
        crc: checksum::to_hex(u64::MAX),
    };
    let tensor = |(spec, &(shard, offset)): (&TensorSpec, &(usize, u64))| {
        let bytes = spec.bytes().expect("it was laid out");
        let extents = geometry::extent_count(offset, bytes, plan.block_size);
        let (crc, logical) = (checksum::to_hex(u64::MAX), spec.logical.as_ref());
        let crcs = crc.repeat(extents as usize);
        let tensor = Unpacked {
            name: spec.name.as_str().into(),
            dtype: spec.dtype,
            shape: spec.shape.clone(),
            shard,
            offset,
            crc: crcs.as_str().into(),
            crc64xz: crc.as_str().into(),
            logical: logical
                .map(|(dtype, shape)| Logical { dtype: dtype.as_str().into(), shape: shape.clone() }),
        };
        tensor.into()
    };
    Body {
        min_reader: 0,
        writer: Writer { name: "fastckpt".to_owned(), version: "0.1.0".to_owned() },
        created: 1.5,
        saved: Saved { engine: "uring".to_owned(), ..Saved::default() },
        block_size: plan.block_size,
        shards: plan.shards.iter().map(shard).collect(),
        tensors: specs.iter().zip(&plan.places).map(tensor).collect(),
        structure: raw(r#"[["dict",1],"a",["tensor",0]]"#),
        metadata: raw("[null]"),
        per_rank: None,
    }
}

/// Bodies of manifests: of random states, and one body with everything that a manifest can have.
fn manifests() -> Vec<Vec<u8>> {
    let rest = |body: &Body| {
        let bytes = manifest::encode(body).expect("it fits");
        bytes[bytes.iter().position(|&byte| byte == b'\n').expect("two lines") + 1..].to_vec()
    };
    let mut found = Vec::new();
    for seed in drawn() {
        let Ok(state) = state(&mut Unstructured::new(&seed)) else { continue };
        if let Ok(plan) = state.lay_out(&state.specs)
            && state.specs.len() < 5
            && is_small(&plan)
        {
            found.push(rest(&body(&state.specs, &plan)));
        }
    }
    let spec = TensorSpec {
        name: "model.w".to_owned(),
        dtype: Dtype::U8,
        shape: vec![16],
        logical: Some(("torch.complex128".to_owned(), vec![])),
    };
    let sizes = Sizes { shard: 1 << 20, block: PAGE };
    let specs = [TensorSpec { name: "o".to_owned(), ..spec.clone() }, spec];
    let plan = layout::lay_out(&specs, &groups::of("model."), sizes, &Reuse::default()).expect("a plan");
    let mut full = body(&specs, &plan);
    full.per_rank = Some(raw(r#"[["list",2],7,["size",[1,2]]]"#));
    full.saved.fallback = Some("EPERM".to_owned());
    full.saved.options = vec![("exclude".to_owned(), "a".to_owned())];
    full.saved.files = vec![manifest::Vouched { modified: -1, links: 2, inode: 3 }; 2];
    found.push(rest(&full));
    found
}

// --- tokens -----------------------------------------------------------------------------------------------------------

/// Compares the check of tokens, which reads text, with the parsed text.
fn tokens(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    // No caller passes a text that is not JSON, but the check must end.
    let _ = tokens::check("text", text);
    let Ok(raw) = serde_json::from_str::<Box<RawValue>>(text) else { return };
    let Ok(value) = serde_json::from_str::<Value>(text) else { return };
    assert_eq!(tokens::check("text", raw.get()).is_ok(), are_tokens(&value), "{text}");
}

/// Whether the value is an array of tokens: plain values, or arrays of plain values and at most one list of them.
fn are_tokens(value: &Value) -> bool {
    let is_plain = |value: &Value| !value.is_array() && !value.is_object();
    let is_list = |value: &Value| value.as_array().is_some_and(|all| all.iter().all(is_plain));
    let is_token = |value: &Value| match value {
        Value::Array(all) => {
            all.iter().all(|one| is_plain(one) || is_list(one))
                && all.iter().filter(|one| one.is_array()).count() < 2
        }
        other => is_plain(other),
    };
    value.as_array().is_some_and(|all| all.iter().all(is_token))
}

fn texts() -> Vec<Vec<u8>> {
    let texts = [
        r#"[["dict",1],"a",["tensor",0]]"#,
        r#"[["size",[1,2]],["slice"],0,null,-1.5e3,"\"[\\",true]"#,
        r#"[["a",[1],[2]]]"#,
        r#"[["a",[[1]]]]"#,
        r#"[{"a":1}]"#,
        "[]",
        "7",
    ];
    texts.map(|text| text.as_bytes().to_vec()).to_vec()
}

// --- headers and the layout -------------------------------------------------------------------------------------------

/// A state to lay out.
struct State {
    specs: Vec<TensorSpec>,
    groups: Vec<Group>,
    sizes: Sizes,
    unchanged: Vec<bool>,
}

impl State {
    fn lay_out(&self, specs: &[TensorSpec]) -> fastckpt_core::Result<Plan> {
        // The flags follow their tensors.
        let flag = |spec: &TensorSpec| {
            self.unchanged[self.specs.iter().position(|one| one == spec).expect("it is there")]
        };
        let unchanged: Vec<_> = specs.iter().map(flag).collect();
        layout::lay_out(specs, &self.groups, self.sizes, &Reuse { unchanged: &unchanged, linked: &[] })
    }
}

const DTYPES: [Dtype; 8] =
    [Dtype::U8, Dtype::F4, Dtype::F6_E2M3, Dtype::BF16, Dtype::F32, Dtype::F64, Dtype::C64, Dtype::BOOL];

/// Makes a random state.
fn state(from: &mut Unstructured<'_>) -> Result<State> {
    let mut specs = Vec::new();
    for _ in 0..from.int_in_range(0..=9)? {
        let start =
            *from.choose(&["", "m.", "m.t.", "a", "\u{e4}\"\\\n", "__metadata__", "m.__metadata__"])?;
        let end = from.int_in_range(0..=3)?;
        let name = if end == 0 { start.to_owned() } else { format!("{start}{end}") };
        let mut shape = Vec::new();
        for _ in 0..from.int_in_range(0..=3)? {
            shape.push(match from.int_in_range(0..=9)? {
                0 => from.arbitrary()?,
                1 => from.int_in_range(0..=40_000)?,
                _ => from.int_in_range(0..=9)?,
            });
        }
        specs.push(if from.ratio(1, 8)? {
            let bytes = shape.iter().fold(1u64, |all, &size| all.wrapping_mul(size)) % 100_000;
            TensorSpec {
                name,
                dtype: Dtype::U8,
                shape: vec![bytes],
                logical: Some(("torch.q".to_owned(), shape)),
            }
        } else {
            TensorSpec { name, dtype: *from.choose(&DTYPES)?, shape, logical: None }
        });
    }
    let groups = match from.int_in_range(0..=3)? {
        0 => groups::of(""),
        1 => groups::of("m."),
        2 => groups::beside("m.", "m.t."),
        _ => groups::of("adapter_model."),
    };
    let shard = if from.ratio(1, 4)? { from.arbitrary()? } else { from.int_in_range(1..=20_000)? };
    let sizes = Sizes { shard, block: PAGE * from.int_in_range(1..=3)? };
    let unchanged = specs.iter().map(|_| from.ratio(1, 3)).collect::<Result<_>>()?;
    Ok(State { specs, groups, sizes, unchanged })
}

/// Lays out a state. The reference implementation reads the headers, and the core reads the manifest.
fn header(data: &[u8]) {
    let Ok(state) = state(&mut Unstructured::new(data)) else { return };
    let names: BTreeSet<_> = state.specs.iter().map(|spec| spec.name.as_str()).collect();
    let bytes = |spec: &TensorSpec| {
        if spec.shape.contains(&0) {
            return Some(0);
        }
        let all = spec.shape.iter().map(|&size| u128::from(size)).try_fold(1u128, u128::checked_mul)?;
        let bits = all.checked_mul(spec.dtype.bitsize() as u128)?;
        (bits % 8 == 0 && bits <= u128::from(u64::MAX)).then_some(bits / 8)
    };
    let total = state.specs.iter().try_fold(0u128, |all, spec| all.checked_add(bytes(spec)?));
    let fits = total.is_some_and(|total| total <= i64::MAX as u128);
    let reserved = groups::RESERVED_NAME;
    // The reference itself refuses a shape if the product of the sizes before a zero is too large.
    let in_order = |spec: &TensorSpec| spec.shape.iter().try_fold(1u64, |all, &size| all.checked_mul(size));
    let writable = state.specs.iter().all(|spec| in_order(spec).is_some());
    let possible = names.len() == state.specs.len() && fits && writable && !names.contains(reserved);
    let plan = match state.lay_out(&state.specs) {
        Ok(plan) => plan,
        Err(error) => return assert!(!possible || total > Some(i64::MAX as u128 - (1 << 20)), "{error}"),
    };
    assert!(possible, "it was laid out");
    let mut seen = vec![0; state.specs.len()];
    for shard in &plan.shards {
        assert!(groups::is_shard_name(&shard.file) && groups::plain_name(&shard.file).is_some());
        let (len, json) = shard.header.split_first_chunk().expect("a length");
        assert_eq!(u64::from_le_bytes(*len), json.len() as u64);
        let read: Metadata = serde_json::from_slice(json).expect("a header");
        assert_eq!(read.tensors().len(), shard.placements.len());
        assert_eq!(read.data_len() as u64, shard.bytes - shard.header.len() as u64);
        for placement in &shard.placements {
            let spec = &state.specs[placement.tensor];
            let name = spec.name.strip_prefix(&shard.prefix).expect("the prefix of its shard");
            let info = read.info(name).expect("it is in its header");
            let shape: Vec<_> = info.shape.iter().map(|&size| size as u64).collect();
            assert_eq!((info.dtype, shape), (spec.dtype, spec.shape.clone()));
            assert_eq!(info.data_offsets.0 as u64 + shard.header.len() as u64, placement.offset);
            assert_eq!(Some(placement.bytes), spec.bytes());
            seen[placement.tensor] += 1;
        }
    }
    assert!(seen.iter().all(|&times| times == 1));
    if is_small(&plan) {
        let body = body(&state.specs, &plan);
        let written = manifest::encode(&body).expect("it fits");
        let texts = [body.structure.get(), body.metadata.get(), ""];
        assert!(written.len() as u64 <= manifest::at_most(&state.specs, &plan, texts));
        sound(&decode(written.into(), Path::new(FILE)).expect("what was laid out"));
    }
    // The order of the state does not matter.
    let reversed: Vec<_> = state.specs.iter().rev().cloned().collect();
    let files =
        |plan: Plan| plan.shards.into_iter().map(|shard| (shard.file, shard.header)).collect::<Vec<_>>();
    assert_eq!(files(state.lay_out(&reversed).expect("the same state")), files(plan));
}

// --- the plan of ranks ------------------------------------------------------------------------------------------------

/// Makes a random spread.
fn spread(from: &mut Unstructured<'_>, ranks: u32) -> Result<Spread> {
    let all: Vec<u32> = (0..ranks).collect();
    Ok(match from.int_in_range(0..=4)? {
        0 => Spread::All,
        1 => Spread::Ranks((0..ranks).filter(|_| from.ratio(1, 2).unwrap_or(false)).collect()),
        2 => {
            let mut boxes = Vec::new();
            for _ in 0..from.int_in_range(0..=4)? {
                let mut bounds = Vec::new();
                for _ in 0..from.int_in_range(0..=2)? {
                    let begin = from.int_in_range(0..=20)?;
                    bounds.push(begin..begin + from.int_in_range(0..=20)?);
                }
                boxes.push((from.int_in_range(0..=ranks)?, bounds));
            }
            Spread::Boxes(boxes)
        }
        kind => {
            let rows =
                if kind == 3 { 1 } else { (2..=3).find(|rows| ranks.is_multiple_of(*rows)).unwrap_or(1) };
            let mesh = vec![u64::from(rows), u64::from(ranks / rows)];
            let mut placements = Vec::new();
            for _ in 0..2 {
                let dim = from.int_in_range(0..=2)?;
                placements.push(match from.int_in_range(0..=3)? {
                    0 => Placement::Replicate,
                    1 => Placement::Strided { dim, factor: from.int_in_range(0..=3)? },
                    _ => Placement::Shard(dim),
                });
            }
            Spread::Mesh { ranks: all, mesh, placements }
        }
    })
}

/// Makes a random job of ranks.
fn share(from: &mut Unstructured<'_>) -> Result<fastckpt_core::Result<Share>> {
    let ranks = from.int_in_range(1..=6)?;
    let spreads = (0..from.int_in_range(1..=3)?).map(|_| spread(from, ranks)).collect::<Result<Vec<_>>>()?;
    let (mut tensors, mut files) = (Vec::new(), vec![(100, 100), (64, 64)]);
    for number in 0..from.int_in_range(1..=5)? {
        let mut shape: Vec<u64> = Vec::new();
        for _ in 0..from.int_in_range(0..=2)? {
            shape.push(from.int_in_range(0..=90)?);
        }
        let elements: u64 = shape.iter().product();
        let stored = if from.ratio(1, 5)? { elements / 2 } else { elements * from.int_in_range(1..=4)? };
        let mut own = Vec::new();
        for _ in 0..from.int_in_range(0..=2)? {
            own.push(from.int_in_range(0..=spreads.len() as u32 - 1)?);
        }
        let shard = from.int_in_range(0..=1)?;
        let (name, offset) = (format!("t{number}"), files[shard].1);
        tensors.push(Tensor { name, stored, shape, shard, offset, spreads: own });
        files[shard].1 += stored;
    }
    let (block, grain, team) =
        (PAGE * from.int_in_range(1..=3)?, PAGE << from.int_in_range(0..=2)?, from.int_in_range(0..=4)?);
    let (apart, first) = (from.arbitrary::<bool>()?, from.arbitrary::<u8>()?);
    let share =
        Share::new(files, block, tensors, spreads, ranks).and_then(|share| share.in_teams(grain, team));
    Ok(share.map(|share| {
        let share = if apart { share.read_apart() } else { share };
        share.first(|tensor| first >> (tensor % 8) & 1 == 1)
    }))
}

/// Plans the work of ranks. Each rank computes only its own part, and the parts must fit together.
fn plan(data: &[u8]) {
    let Ok(Ok(share)) = share(&mut Unstructured::new(data)) else { return };
    for purpose in [Purpose::Save, Purpose::Load] {
        let all: Vec<_> = (0..share.ranks()).map(|rank| share.duties(rank, purpose)).collect();
        let refused = all.iter().filter(|duties| duties.is_err()).count();
        assert!(refused == 0 || refused == all.len(), "some ranks are refused, and others are not");
        if refused > 0 {
            continue;
        }
        let all: Vec<_> = all.into_iter().filter_map(std::result::Result::ok).collect();
        they_fit(&share, &all, purpose);
        for (rank, duties) in (0..).zip(&all) {
            if purpose == Purpose::Load {
                gets_all(&share, rank, duties);
            }
        }
    }
    assert_eq!(
        share.replicated().is_ok(),
        share.duties(0, Purpose::Load).is_ok(),
        "only spreads can be refused"
    );
}

/// Sent and received messages match, and in a save each byte has one writer.
fn they_fit(share: &Share, all: &[Duties], purpose: Purpose) {
    type Side = BTreeMap<(u32, u32), Vec<(u64, Vec<(usize, u64)>)>>;
    let (mut sent, mut received) = (Side::new(), Side::new());
    let said = |message: &Message| {
        assert_eq!(message.bytes, message.items.iter().map(|item| item.len).sum::<u64>());
        (message.bytes, message.items.iter().map(|item| (item.tensor, item.len)).collect())
    };
    for (rank, duties) in (0..).zip(all) {
        let (out, into) = duties.lanes(purpose);
        for message in out {
            sent.entry((rank, message.peer)).or_default().push(said(message));
        }
        for message in into {
            received.entry((message.peer, rank)).or_default().push(said(message));
        }
    }
    assert_eq!(sent, received);
    assert!(sent.keys().all(|(from, to)| from != to));
    if purpose == Purpose::Save {
        let mut written: Vec<_> = all.iter().flat_map(|duties| &duties.ranges).collect();
        written.sort_by_key(|range| (range.shard, range.start));
        for (shard, &(_, end)) in share.files().iter().enumerate() {
            // The first range also covers the header.
            let mut at = 0;
            for range in written.iter().filter(|range| range.shard == shard) {
                assert_eq!(range.start, at, "a byte without a writer, or with two");
                at = range.end;
            }
            assert_eq!(at, end);
        }
        let own = |duties: &Duties| {
            let items = duties.local.iter().chain(duties.io.iter().flat_map(|message| &message.items));
            items.map(|item| item.len).sum::<u64>()
        };
        let stored: u64 = share.tensors().iter().map(|tensor| tensor.stored).sum();
        assert_eq!(all.iter().map(own).sum::<u64>(), stored);
    }
}

/// A load fills each part of a rank once.
fn gets_all(share: &Share, rank: u32, duties: &Duties) {
    let mut found: BTreeMap<(usize, u32), u64> = BTreeMap::new();
    let others = duties.boxes.iter().flat_map(|message| &message.items).filter(|item| item.own);
    for item in duties.local.iter().chain(&duties.apart).chain(others) {
        *found.entry((item.tensor, item.part)).or_default() += item.len;
    }
    for tensor in 0..share.tensors().len() {
        for part in 0.. {
            if share.part_shape(rank, tensor, part).is_ok_and(|shape| shape.is_none()) {
                break;
            }
            let bytes = share.part_bytes(rank, tensor, part).expect("a part of a sound share");
            assert_eq!(found.remove(&(tensor, part)).unwrap_or(0), bytes, "part {part} of tensor {tensor}");
        }
    }
    assert!(found.is_empty(), "bytes for parts that are not there: {found:?}");
}

// --- messages between ranks -------------------------------------------------------------------------------------------

/// Reads messages of ranks, combines them, and encodes them again.
fn messages(data: &[u8]) {
    let Some((kind, rest)) = data.split_first() else { return };
    if kind % 2 == 0 {
        sums(rest);
    } else {
        let mut all = Vec::new();
        let outcome = pieces::decode(rest, &mut all);
        assert_eq!(outcome.is_ok(), rest.len() % 36 == 0);
        if outcome.is_ok() {
            assert_eq!(pieces::encode(&all), rest);
        }
        let _ = drawn_pieces(&mut Unstructured::new(rest), all);
    }
}

/// Pieces, most of them near the extents of a small job. Their order and earlier merges must not matter.
fn drawn_pieces(from: &mut Unstructured<'_>, mut all: Vec<Piece>) -> Result<()> {
    let tensor = |stored, shard, offset| {
        let name = format!("t{shard}{offset}");
        Tensor { name, stored, shape: vec![stored], shard, offset, spreads: vec![0] }
    };
    let (three, two) = (3 * PAGE + 5, 2 * PAGE);
    let tensors =
        vec![tensor(three, 0, 100), tensor(0, 0, 100 + three), tensor(7, 0, 100 + three), tensor(two, 1, 64)];
    let files = vec![(100, 107 + three), (64, 64 + two)];
    let share = Share::new(files, PAGE, tensors, vec![Spread::All], 1).expect("a share");
    let ends = [100, PAGE, two, 3 * PAGE, 100 + three, 107 + three];
    while !from.is_empty() {
        let (file, at) = (u32::from(from.ratio(1, 4)?), usize::from(from.int_in_range(0u8..=5)?));
        let (start, end) = (ends[at], ends[(at + 1).min(5)]);
        let middle = start + u64::from(from.arbitrary::<u16>()?) % (end - start).max(1);
        let (start, end) = match from.int_in_range(0..=3)? {
            0 => (start, middle),
            1 => (middle, end),
            2 => (middle, middle + u64::from(from.arbitrary::<u8>()?)),
            _ => (start, end),
        };
        all.push(Piece {
            shard: file,
            start,
            len: end - start,
            sum: Pair { crc: from.arbitrary()?, xz: from.arbitrary()? },
        });
    }
    let merged = share.merge(all.clone());
    let mut backwards = all.clone();
    backwards.reverse();
    assert_eq!(share.merge(backwards).ok(), merged.as_ref().ok().cloned());
    let Ok(merged) = merged else { return Ok(()) };
    let bytes = |all: &[Piece]| all.iter().map(|piece| piece.len).sum::<u64>();
    assert_eq!(bytes(&merged), bytes(&all));
    assert_eq!(share.merge(merged.clone()).ok(), Some(merged.clone()));
    let (covered, again) = (share.cover_all(all), share.cover_all(merged.clone()));
    assert_eq!(covered.as_ref().ok(), again.as_ref().ok());
    assert_eq!(covered.is_ok(), bytes(&merged) == three + 7 + two, "all bytes are there, or not");
    Ok(())
}

/// Sums of ranks for a base, added in any order and forwarded by other ranks.
fn sums(data: &[u8]) {
    let (outcome, most) = measured(|| Sums::decode(data));
    assert!(most <= 2 * data.len() + ROOM, "{most} bytes for {} of sums", data.len());
    let Ok(found) = outcome else { return };
    // After a merge, a changed tensor has no other findings.
    let both = |mut one: Sums, other: Sums| {
        one.add(other);
        one
    };
    let plain = both(Sums::default(), found.clone());
    assert_eq!(Sums::decode(&plain.encode()).expect("what was encoded"), plain);
    let half = Sums::decode(&data[data.len() / 2..]).unwrap_or_default();
    assert_eq!(both(plain.clone(), half.clone()), both(half, plain));
}
