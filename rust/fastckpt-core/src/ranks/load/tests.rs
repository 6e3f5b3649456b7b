//! Jobs of several ranks in one process, in little memory. For the core, the destinations of a rank are not host
//! memory. The tests of the binding use host memory that a device fills without a copy.

use std::collections::HashMap;
use std::ops::Range;

use safetensors::Dtype;

use super::*;
use crate::engine::content::{Content, Push};
use crate::engine::io::fault::{Fault, FaultPlan};
use crate::format::geometry::PAGE;
use crate::format::groups;
use crate::format::layout::TensorSpec;
use crate::ranks::mail::tests::{held, with_mail};
use crate::ranks::places::Place;
use crate::save::{Contents, Request, save};
use crate::share::{Placement, Spread, Tensor};

const RANKS: u32 = 4;
const SHAPES: [[u64; 2]; 7] = [[700, 301], [5, 3], [1, 1], [64, 64], [301, 1024], [0, 7], [9, 4099]];

type Memory = Arc<Mutex<Vec<u8>>>;

/// A checkpoint and its bytes.
struct Saved {
    _parent: tempfile::TempDir,
    checkpoint: Arc<Checkpoint>,
    bytes: Vec<Vec<u8>>,
    /// The number of ranks of a team. All ranks of a team have the same chunks.
    team: u32,
    copies: u32,
}

fn options() -> Options {
    Options { block_size: Some(16 * PAGE), threads: Some(2), ..Options::default() }
}

fn saved() -> Saved {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("c");
    let byte = |index: usize, at: u64| (at.wrapping_mul(31) ^ (at >> 8) ^ index as u64) as u8;
    let bytes = SHAPES.iter().enumerate();
    let bytes: Vec<Vec<u8>> = bytes
        .map(|(index, [rows, columns])| (0..rows * columns).map(|at| byte(index, at)).collect())
        .collect();
    let spec = |(index, shape): (usize, &[u64; 2])| TensorSpec {
        name: format!("t.{index}"),
        dtype: Dtype::U8,
        shape: shape.to_vec(),
        logical: None,
    };
    let tensors: Vec<_> = SHAPES.iter().enumerate().map(spec).collect();
    let pull = |bytes: Vec<u8>| {
        Content::each(move |start, to: &mut [u8]| {
            to.copy_from_slice(&bytes[start as usize..start as usize + to.len()]);
            Ok(())
        })
    };
    let contents: Vec<_> = bytes.iter().cloned().map(pull).collect();
    let request = Request {
        path: &path,
        tensors: &tensors,
        groups: &groups::of(""),
        shard_size: 400_000,
        contents: Contents::Tensors(&contents),
        base: None,
        frozen: &[],
        structure: "[null]",
        metadata: "[null]",
        files: &[],
        overwrite: true,
    };
    save(&request, &options(), &mut |_, _| true).unwrap();
    Saved {
        _parent: parent,
        checkpoint: Arc::new(Checkpoint::open(&path).unwrap()),
        bytes,
        team: 1,
        copies: 1,
    }
}

/// The dimension along which ranks have chunks; `None` if each rank has everything.
type Layout = Option<usize>;

/// The part of `size` indices that `torch.chunk` gives to `rank` of `ranks`.
fn chunk(size: u64, rank: u32, ranks: u32) -> Range<usize> {
    let len = size.div_ceil(u64::from(ranks));
    let edge = |index: u32| (len * u64::from(index)).min(size) as usize;
    edge(rank)..edge(rank + 1)
}

impl Saved {
    fn share(&self, layout: Layout) -> Share {
        let body = self.checkpoint.body();
        let tensor = |tensor: &crate::format::manifest::TensorEntry| Tensor {
            name: tensor.name().to_owned(),
            stored: tensor.bytes(),
            shape: tensor.shape(),
            shard: tensor.shard(),
            offset: tensor.offset,
            spreads: vec![0],
        };
        let spread = layout.map_or(Spread::All, |dim| Spread::Mesh {
            ranks: (0..RANKS).collect(),
            mesh: vec![self.copies.into(), (RANKS / self.copies).into()],
            placements: vec![Placement::Replicate, Placement::Shard(dim)],
        });
        let files = body.shards.iter().map(|shard| (shard.data_offset, shard.bytes)).collect();
        let tensors = body.tensors.iter().map(tensor).collect();
        let share = Share::new(files, body.block_size, tensors, vec![spread], RANKS).unwrap();
        share.in_teams(PAGE, self.team).unwrap()
    }

    fn expected(&self, rank: u32, layout: Layout, tensor: usize) -> Vec<u8> {
        let ([rows, columns], ranks) = (SHAPES[tensor], RANKS / self.copies);
        let (mut of_rows, mut of_columns) = (0..rows as usize, 0..columns as usize);
        match layout {
            Some(0) => of_rows = chunk(rows, rank % ranks, ranks),
            Some(_) => of_columns = chunk(columns, rank % ranks, ranks),
            None => {}
        }
        let row = |row: usize| &self.bytes[tensor][row * columns as usize..][of_columns.clone()];
        of_rows.flat_map(row).copied().collect()
    }

    /// The load of a rank, and its memory by tensor.
    fn rank(&self, rank: u32, layout: Layout, budget: u64) -> (RankLoad, HashMap<usize, Memory>) {
        let share = self.share(layout);
        let mut memories = HashMap::new();
        let mut places = Places::new();
        for tensor in 0..SHAPES.len() {
            let bytes = share.part_bytes(rank, tensor, 0).unwrap();
            let memory: Memory = Arc::new(Mutex::new(vec![0; bytes as usize]));
            memories.insert(tensor, Arc::clone(&memory));
            let place = Place::Push(Push::each(move |start: u64, from: &[u8]| {
                let mut memory = lock(&memory);
                let to = memory.get_mut(start as usize..start as usize + from.len());
                to.ok_or("the bytes are beyond the part")?.copy_from_slice(from);
                Ok(())
            }));
            places.insert((tensor, 0), place);
        }
        let checkpoint = Arc::clone(&self.checkpoint);
        (RankLoad::with_budget(&share, rank, checkpoint, places, budget).unwrap(), memories)
    }

    fn ranks(&self, layout: Layout, budget: u64) -> (Vec<RankLoad>, Vec<HashMap<usize, Memory>>) {
        (0..RANKS).map(|rank| self.rank(rank, layout, budget)).unzip()
    }
}

fn read(ranks: &[RankLoad], options: impl Fn(usize) -> Options + Sync) -> Vec<Result<Loaded>> {
    let mails: Vec<&Mail> = ranks.iter().map(|rank| &**rank.mail()).collect();
    with_mail(&mails, |rank| ranks[rank].read(true, &options(rank), &mut |_, _| true))
}

#[test]
fn all_parts_are_filled_in_any_budget() {
    let mut saved = saved();
    let total: u64 = saved.bytes.iter().map(|bytes| bytes.len() as u64).sum();
    for (layout, team, copies) in
        [(Some(0), 1, 1), (Some(1), 1, 1), (None, 1, 1), (Some(0), 2, 1), (Some(0), 2, 2)]
    {
        (saved.team, saved.copies) = (team, copies);
        for budget in [1, 100_000, BUDGET] {
            let (ranks, memories) = saved.ranks(layout, budget);
            let loaded = read(&ranks, |_| options());
            let loaded = loaded.into_iter().collect::<Result<Vec<_>>>().unwrap();
            let sum = |figure: fn(&Loaded) -> u64| loaded.iter().map(figure).sum::<u64>();
            assert_eq!(sum(|loaded| loaded.storage), total, "each byte is read once");
            // A relay of a team sends bytes once more, unless the relay wants them itself.
            let relayed = sum(|loaded| loaded.sent) - sum(|loaded| loaded.peers);
            assert_eq!(relayed > 0, team > copies);
            let duties = (0..RANKS).map(|rank| saved.share(layout).duties(rank, Purpose::Load).unwrap());
            assert_eq!(duties.filter(|duties| !duties.relays.is_empty()).count() > 0, team > 1);
            assert!(sum(|loaded| loaded.peers) > 0);
            let copies = if layout.is_none() { RANKS } else { copies };
            assert_eq!(sum(|loaded| loaded.report.bytes), u64::from(copies) * total);
            for ((rank, load), memories) in (0..).zip(&ranks).zip(&memories) {
                for (&tensor, memory) in memories {
                    assert!(
                        *lock(memory) == saved.expected(rank, layout, tensor),
                        "rank {rank}, tensor {tensor}, {layout:?}, {budget} bytes"
                    );
                }
                assert_eq!(held(load.mail()), (0, 0));
            }
        }
    }
}

#[test]
fn a_disk_that_fails_one_rank_fails_all_that_want_its_bytes() {
    let saved = saved();
    for broken in 0..RANKS as usize {
        for budget in [1, BUDGET] {
            let (ranks, _) = saved.ranks(None, budget);
            let faults = Some(FaultPlan::new(1, Fault::Errno(libc::EIO), true));
            let failing = |rank| Options { faults: faults.clone().filter(|_| rank == broken), ..options() };
            for (rank, outcome) in read(&ranks, failing).into_iter().enumerate() {
                match outcome {
                    Err(Error::Io { source, .. }) => {
                        assert_eq!((rank, source.raw_os_error()), (broken, Some(libc::EIO)));
                    }
                    Err(Error::Stopped(why)) => assert_ne!(rank, broken, "{why}"),
                    other => panic!("rank {rank}: {other:?}"),
                }
            }
        }
    }
}

#[test]
fn a_rank_that_waits_ends_when_it_is_closed_or_interrupted() {
    let saved = saved();
    let (ranks, _) = saved.ranks(Some(1), BUDGET);
    // No rank sends a message.
    thread::scope(|scope| {
        let waits =
            crate::ranks::mail::tests::spawn(scope, || ranks[0].read(true, &options(), &mut |_, _| true));
        ranks[0].close();
        let error = waits.join().unwrap().unwrap_err();
        // The load may have begun after the end.
        assert!(matches!(error, Error::Stopped(_) | Error::Misused(_)), "{error}");
    });
    let interrupted = ranks[1].read(true, &options(), &mut |_, _| false);
    assert!(matches!(interrupted, Err(Error::Interrupted)), "{interrupted:?}");
}
