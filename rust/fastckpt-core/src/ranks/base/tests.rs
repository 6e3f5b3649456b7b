//! The jobs of the tests of a rank's save, with a base.

use super::*;
use crate::engine::content::Content;
use crate::format::checksum::Pair;
use crate::format::groups;
use crate::ranks::save::tests::{Job, LAYOUTS, RANKS, SHARD, options};
use crate::save::{Contents, Request, save};

/// Saves some tensors of a job's state in one process, in the order of `names`, so that their bytes have other places
/// in the files than in the layout of the job.
fn base_of(job: &Job, names: &[&str], bytes: &[Vec<u8>]) -> std::path::PathBuf {
    let path = job.path().with_extension("base");
    let chosen = |name: &&str| job.tensors.iter().position(|tensor| tensor.name == *name).unwrap();
    let chosen: Vec<_> = names.iter().map(chosen).collect();
    let tensors: Vec<_> = chosen.iter().map(|&tensor| job.tensors[tensor].clone()).collect();
    let content = |&tensor: &usize| {
        let bytes = bytes[tensor].clone();
        Content::each(move |start, to: &mut [u8]| {
            to.copy_from_slice(&bytes[start as usize..start as usize + to.len()]);
            Ok(())
        })
    };
    let contents: Vec<_> = chosen.iter().map(content).collect();
    let request = Request {
        path: &path,
        tensors: &tensors,
        groups: &groups::of(""),
        shard_size: SHARD,
        contents: Contents::Tensors(&contents),
        base: None,
        frozen: &[],
        structure: "[null]",
        metadata: "[1]",
        files: &[],
        overwrite: true,
    };
    save(&request, &options(), &mut |_, _| true).unwrap();
    path
}

fn bases(job: &Job) -> Vec<RankBase> {
    let base = |rank| RankBase::new(Arc::clone(&job.table), rank, job.held(rank), options()).unwrap();
    (0..RANKS).map(base).collect()
}

/// The findings of all ranks about a base, each encoded and decoded before they are merged.
fn found(ranks: &[RankBase], path: &Path) -> Sums {
    let manifest = ranks[0].open(path).unwrap().unwrap();
    ranks[1..].iter().for_each(|rank| rank.know(path, &manifest).unwrap());
    let mut all = Sums::default();
    for rank in ranks.iter().rev() {
        let own = rank.compare(&mut |_, _| true).unwrap().encode();
        assert_eq!(Sums::decode(&own).unwrap().encode(), own);
        // A rank that gives no bytes sums no bytes.
        assert!(own.is_empty() || Sums::decode(&own[..own.len() - 1]).is_err());
        all.add(Sums::decode(&own).unwrap());
    }
    all
}

/// The numbers of the tensors that equal those of a base.
fn unchanged(job: &Job, path: &Path) -> Vec<usize> {
    let ranks = bases(job);
    let found = found(&ranks, path);
    let same = found.unchanged(&job.tensors, ranks[0].base().unwrap().body());
    (0..same.len()).filter(|&tensor| same[tensor].is_some()).collect()
}

#[test]
fn what_is_unchanged_is_found_however_it_is_spread_and_wherever_it_lay() {
    let names = ["t.0", "t.1", "t.2", "t.3", "t.4", "t.5", "t.6"];
    for layout in LAYOUTS {
        let job = Job::new(layout);
        assert_eq!(unchanged(&job, &base_of(&job, &names, &job.bytes)), [0, 1, 2, 3, 4, 5, 6], "{layout:?}");
        // Without the others, each tensor has another place, in other blocks.
        for some in [&["t.1", "t.4", "t.5"][..], &["t.2", "t.0"], &["t.6", "t.3"]] {
            let mut expected: Vec<usize> = some.iter().map(|name| name[2..].parse().unwrap()).collect();
            expected.sort_unstable();
            assert_eq!(unchanged(&job, &base_of(&job, some, &job.bytes)), expected, "{layout:?}");
        }
    }
}

#[test]
fn a_single_other_byte_is_found() {
    let names = ["t.0", "t.1", "t.4", "t.6"];
    for layout in LAYOUTS {
        let job = Job::new(layout);
        for (tensor, at) in [(0, 0), (0, 300_000), (0, 630_699), (1, 14), (4, 70_000), (6, 4099 * 9 - 1)] {
            let mut bytes = job.bytes.clone();
            bytes[tensor][at] ^= 0x40;
            let expected: Vec<_> = [0, 1, 4, 6].into_iter().filter(|&other| other != tensor).collect();
            assert_eq!(unchanged(&job, &base_of(&job, &names, &bytes)), expected, "{layout:?} {tensor} {at}");
        }
    }
}

#[test]
fn a_change_that_leaves_one_of_the_two_checksums_as_it_was_is_found() {
    let (one, none) = (Pair::of(&[1]), Pair::zeros(1));
    // A multiple of one polynomial: it changes bytes only in a way that this checksum does not show.
    for (unseen, rest) in [(0, one.crc ^ none.crc), (1, one.xz ^ none.xz)] {
        let delta: Vec<u8> = [1].into_iter().chain(rest.to_le_bytes()).collect();
        let changed = Pair::of(&delta) ^ Pair::zeros(9);
        assert_eq!([changed.crc == 0, changed.xz == 0], [unseen == 0, unseen == 1]);
        for layout in LAYOUTS {
            let job = Job::new(layout);
            for (tensor, at) in [(0, 300_000), (0, 0), (4, 70_000), (6, 4095)] {
                let mut bytes = job.bytes.clone();
                bytes[tensor][at..].iter_mut().zip(&delta).for_each(|(byte, delta)| *byte ^= delta);
                let expected: Vec<_> = [0, 1, 4, 6].into_iter().filter(|&other| other != tensor).collect();
                let base = base_of(&job, &["t.0", "t.1", "t.4", "t.6"], &bytes);
                assert_eq!(unchanged(&job, &base), expected, "{layout:?} {tensor} {at}");
            }
        }
    }
}

#[test]
fn a_tensor_of_which_bytes_are_missing_has_changed() {
    let job = Job::new(crate::ranks::save::tests::Layout::Columns);
    let path = base_of(&job, &["t.0", "t.1"], &job.bytes);
    let ranks = bases(&job);
    let all = found(&ranks, &path);
    let body = ranks[0].base().unwrap().body();
    let some = ranks[1].compare(&mut |_, _| true).unwrap();
    assert_eq!(some.unchanged(&job.tensors, body), [None; 7]);
    // A finding that is added twice cancels itself (xor), and its bytes are counted twice.
    let mut twice = all.clone();
    twice.add(all);
    assert_eq!(twice.unchanged(&job.tensors, body), [None; 7]);
}

#[test]
fn what_the_coordinator_says_fits_the_state() {
    let job = Job::new(crate::ranks::save::tests::Layout::Rows);
    let path = base_of(&job, &["t.0", "t.1", "t.2", "t.3", "t.4", "t.5", "t.6"], &job.bytes);
    let ranks = bases(&job);
    let all = found(&ranks, &path);
    let told = ranks[0].take(&job.path(), true, &all, &mut |_, _| true).unwrap();
    for rank in &ranks[1..] {
        assert!(rank.follow(&told[1..]).is_err() && rank.follow(&[&told[..], &[0]].concat()).is_err());
        let mut other = told.clone();
        other[4] = 9;
        let error = rank.follow(&other).unwrap_err();
        assert!(error.to_string().contains("of another state"), "{error}");
        rank.prepared().linked.shards.clear();
        rank.follow(&told).unwrap();
    }
    let digests: Vec<_> = ranks.iter().map(|rank| rank.table().unwrap().share.digest()).collect();
    assert_eq!(digests, [digests[0]; RANKS as usize]);
    let table = ranks[0].table().unwrap();
    assert!(table.plan.shards.iter().all(|shard| shard.linked.is_some()));
    assert_eq!(table.share.duties(0, Purpose::Save).unwrap().ranges, []);
    // The workspace is removed when the coordinator's part is dropped.
    let entries = || std::fs::read_dir(job.path().parent().unwrap()).unwrap().count();
    assert_eq!(entries(), 2);
    ranks[0].close();
    assert_eq!(entries(), 1);
}

#[test]
fn steps_come_in_order() {
    let job = Job::new(crate::ranks::save::tests::Layout::Copies);
    let path = base_of(&job, &["t.1"], &job.bytes);
    let rank = bases(&job).remove(0);
    assert!(matches!(rank.compare(&mut |_, _| true), Err(Error::Misused(_))));
    let manifest = rank.open(&path).unwrap().unwrap();
    assert!(matches!(rank.know(&path, &manifest), Err(Error::Misused(_))));
    let other = bases(&job).remove(1);
    other.know(&path, &std::fs::read(path.join("fastckpt.json")).unwrap()).unwrap();
    let taken = other.take(&job.path(), true, &Sums::default(), &mut |_, _| true);
    assert!(matches!(taken, Err(Error::Misused(_))));
    // A path without a base causes a warning.
    let rank = bases(&job).remove(0);
    assert_eq!(rank.open(&path.join("none")).unwrap(), None);
    assert!(rank.prepared().linked.warnings[0].contains("every tensor was written"));
    assert_eq!(rank.table().unwrap().share.digest(), job.table.share.digest());
}
