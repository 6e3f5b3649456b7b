//! Jobs of several ranks in one process. For the core, the memory of a rank is not host memory. The tests of the
//! binding use host memory that a device reads without a copy.

use std::ops::Range;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender, channel};

use safetensors::Dtype;

use super::*;
use crate::engine::content::Content;
use crate::engine::io::fault::{Fault, FaultPlan};
use crate::format::geometry::PAGE;
use crate::format::groups;
use crate::format::layout::{Shard, Sizes, TensorSpec};
use crate::format::manifest;
use crate::ranks::mail::tests::{carry, spawn};
use crate::read::Checkpoint;
use crate::save::work::Unit;
use crate::save::{Contents, Request, save};
use crate::share::{Placement, Spread};
use crate::sys::memory::Bytes;

pub(in crate::ranks) const RANKS: u32 = 3;
const BLOCK: u64 = 16 * PAGE;
pub(in crate::ranks) const SHARD: u64 = 600_000;

/// How all tensors are spread.
#[derive(Debug, Clone, Copy)]
pub(in crate::ranks) enum Layout {
    Rows,
    Columns,
    Copies,
    /// As `Rows`, with teams of two ranks.
    Teams,
}

pub(in crate::ranks) const LAYOUTS: [Layout; 4] =
    [Layout::Rows, Layout::Columns, Layout::Copies, Layout::Teams];

/// A state of a job, and the path that it is saved to.
pub(in crate::ranks) struct Job {
    parent: tempfile::TempDir,
    pub(in crate::ranks) tensors: Vec<TensorSpec>,
    pub(in crate::ranks) bytes: Vec<Vec<u8>>,
    layout: Layout,
    pub(in crate::ranks) table: Arc<Table>,
}

/// The part of `size` indices that `torch.chunk` gives to `rank`.
fn chunk(size: u64, rank: u32) -> Range<usize> {
    let len = size.div_ceil(u64::from(RANKS));
    let edge = |index: u32| (len * u64::from(index)).min(size) as usize;
    edge(rank)..edge(rank + 1)
}

fn pull(bytes: Vec<u8>) -> Content {
    Content::each(move |start, to: &mut [u8]| {
        to.copy_from_slice(&bytes[start as usize..start as usize + to.len()]);
        Ok(())
    })
}

pub(in crate::ranks) fn options() -> Options {
    Options { block_size: Some(BLOCK), threads: Some(2), ..Options::default() }
}

impl Job {
    pub(in crate::ranks) fn new(layout: Layout) -> Self {
        let shapes = [[700, 901], [5, 3], [1, 1], [64, 64], [301, 1024], [0, 7], [9, 4099]];
        let spec = |(index, shape): (usize, &[u64; 2])| TensorSpec {
            name: format!("t.{index}"),
            dtype: Dtype::U8,
            shape: shape.to_vec(),
            logical: None,
        };
        let tensors: Vec<_> = shapes.iter().enumerate().map(spec).collect();
        let byte = |index: usize, at: u64| (at.wrapping_mul(31) ^ (at >> 8) ^ index as u64) as u8;
        let bytes = shapes.iter().enumerate();
        let bytes =
            bytes.map(|(index, [rows, columns])| (0..rows * columns).map(|at| byte(index, at)).collect());
        let mesh = |dim| Spread::Mesh {
            ranks: (0..RANKS).collect(),
            mesh: vec![RANKS.into()],
            placements: vec![Placement::Shard(dim)],
        };
        let spread = match layout {
            Layout::Rows | Layout::Teams => mesh(0),
            Layout::Columns => mesh(1),
            Layout::Copies => Spread::All,
        };
        let groups = groups::of("");
        let files = (&*groups, Sizes { shard: SHARD, block: BLOCK }, &[][..]);
        let spreads = vec![vec![0]; tensors.len()];
        let mut table = Table::new(tensors.clone(), spreads, vec![spread], RANKS, files).unwrap();
        if let Layout::Teams = layout {
            table.share = table.share.in_teams(4 * PAGE, 2).unwrap();
        }
        let (parent, table) = (tempfile::tempdir().unwrap(), Arc::new(table));
        Self { parent, bytes: bytes.collect(), tensors, layout, table }
    }

    pub(in crate::ranks) fn path(&self) -> PathBuf {
        self.parent.path().join("c")
    }

    fn local(&self, rank: u32, tensor: usize) -> Vec<u8> {
        let [rows, columns] = *self.tensors[tensor].shape else { unreachable!() };
        let (mut of_rows, mut of_columns) = (0..rows as usize, 0..columns as usize);
        match self.layout {
            Layout::Rows | Layout::Teams => of_rows = chunk(rows, rank),
            Layout::Columns => of_columns = chunk(columns, rank),
            Layout::Copies => {}
        }
        let row = |row: usize| &self.bytes[tensor][row * columns as usize..][of_columns.clone()];
        of_rows.flat_map(row).copied().collect()
    }

    pub(in crate::ranks) fn held(&self, rank: u32) -> Held {
        Held::new((0..self.tensors.len()).map(|tensor| ((tensor, 0), pull(self.local(rank, tensor)))))
    }

    fn rank(&self, rank: u32, options: Options) -> RankSave {
        RankSave::new(Arc::clone(&self.table), rank, self.held(rank), options, None).unwrap()
    }

    /// The ranks. Their parts are in host memory, except the parts of one rank.
    fn in_memory(&self) -> Vec<RankSave> {
        let memory = |bytes: Vec<u8>| Content::Memory(Bytes::from(&*bytes.leak()));
        let part = |rank, tensor| {
            if rank == 1 { pull(self.local(rank, tensor)) } else { memory(self.local(rank, tensor)) }
        };
        let held = |rank| Held::new((0..self.tensors.len()).map(|tensor| ((tensor, 0), part(rank, tensor))));
        let save = |rank| RankSave::new(Arc::clone(&self.table), rank, held(rank), options(), None).unwrap();
        (0..RANKS).map(save).collect()
    }

    fn ranks(&self) -> Vec<RankSave> {
        (0..RANKS).map(|rank| self.rank(rank, options())).collect()
    }

    /// Creates the workspace, and makes all ranks join it.
    fn meet(&self, ranks: &[RankSave]) -> PathBuf {
        let name = ranks[0].create(&self.path(), true, &mut |_, _| true).unwrap();
        ranks[1..].iter().for_each(|rank| rank.join(&self.path(), &name).unwrap());
        self.parent.path().join(name)
    }

    /// Like [`Self::meet`], and all ranks allocate their files.
    fn open(&self, ranks: &[RankSave]) -> PathBuf {
        let workspace = self.meet(ranks);
        for rank in &ranks[1..] {
            rank.allocate(&mut |_, _| true).unwrap();
        }
        workspace
    }

    /// Saves the same state with one process.
    fn one(&self) -> PathBuf {
        let path = self.parent.path().join("one");
        let contents: Vec<_> = self.bytes.iter().map(|bytes| pull(bytes.clone())).collect();
        let request = Request {
            path: &path,
            tensors: &self.tensors,
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

    fn entries(&self) -> Vec<String> {
        let name =
            |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().file_name().into_string().unwrap();
        let mut all: Vec<_> = std::fs::read_dir(self.parent.path()).unwrap().map(name).collect();
        all.sort();
        all
    }
}

fn commit<'a>(pieces: Vec<Piece>) -> Commit<'a> {
    let figures = Figures { engine: "threads".to_owned(), threads: 2, seconds: 0.5, ..Figures::default() };
    Commit { pieces, structure: "[null]", metadata: "[1]", per_rank: "", files: &[], figures }
}

/// Sends all messages of a rank. `doors[r]` sends to rank `r`. Dropping it means that no more messages will come.
fn send(mail: &Mail, doors: &[Sender<usize>]) -> Result<()> {
    let [sent, _] = mail.travelling();
    for (message, (peer, _)) in sent {
        mail.pack(message)?;
        let _ = doors[peer as usize].send(message);
    }
    Ok(())
}

/// Receives all messages of a rank. If no more messages come, the mail of this rank is stopped.
fn receive(ranks: &[RankSave], rank: usize, doors: &[Receiver<usize>]) -> Result<()> {
    let mail = ranks[rank].mail();
    let [_, received] = mail.travelling();
    for (there, (peer, _)) in received {
        mail.admit(there)?;
        let from = ranks[peer as usize].mail();
        let Ok(message) = doors[peer as usize].recv() else {
            mail.stop(&format!("rank {peer} has failed"));
            return Ok(());
        };
        carry(from, message, mail, there);
        from.sent(message)?;
        mail.arrived(there)?;
    }
    Ok(())
}

/// Makes all ranks write while their mail runs. Returns the result of each rank.
fn write(ranks: &[RankSave]) -> Vec<Result<Report>> {
    let (mut ins, mut outs) = (Vec::new(), Vec::new());
    for _ in ranks {
        let (senders, receivers): (Vec<_>, Vec<_>) = ranks.iter().map(|_| channel()).unzip();
        ins.push(senders);
        outs.push(receivers);
    }
    // Door `from` of rank `to` is the one that rank `from` uses to reach it.
    let doors = (0..ranks.len()).map(|from| ins.iter().map(|doors| doors[from].clone()).collect::<Vec<_>>());
    let doors: Vec<_> = doors.collect();
    drop(ins);
    std::thread::scope(|scope| {
        let mut carriers = Vec::new();
        for ((rank, doors), out) in doors.into_iter().enumerate().zip(outs) {
            carriers.push(spawn(scope, move || send(ranks[rank].mail(), &doors)));
            carriers.push(spawn(scope, move || receive(ranks, rank, &out)));
        }
        let writers: Vec<_> =
            ranks.iter().map(|rank| spawn(scope, || rank.write(&mut |_, _| true))).collect();
        let reports: Vec<_> = writers.into_iter().map(|writer| writer.join().unwrap()).collect();
        let moved: Result<Vec<()>> = carriers.into_iter().map(|carrier| carrier.join().unwrap()).collect();
        assert!(moved.is_ok() || reports.iter().any(Result::is_err), "{moved:?}");
        reports
    })
}

fn close(ranks: &[RankSave], committed: bool) {
    for rank in ranks {
        rank.close(committed);
    }
}

fn pieces(ranks: &[RankSave]) -> Vec<Piece> {
    ranks.iter().flat_map(|rank| rank.pieces().unwrap()).collect()
}

/// Makes the ranks read each other's memory, in this one process. Returns the number of bytes that no message carries.
fn share(ranks: &[RankSave]) -> u64 {
    let all: Vec<u32> = (0..ranks.len() as u32).collect();
    let given: Vec<_> = ranks.iter().map(|rank| rank.addresses(&all)).collect();
    let each = |(own, rank): (usize, &RankSave)| {
        let of = |&peer: &u32| {
            let (_, addresses, _) = &given[peer as usize][own];
            assert_eq!(addresses.len(), given[own][peer as usize].2);
            (addresses.iter().all(|at| *at != 0)).then(|| (peer, std::process::id(), addresses.clone()))
        };
        let readers = given[own].iter().filter(|(_, own, _)| own.iter().all(|at| *at != 0));
        let readers = readers.map(|(peer, ..)| *peer).collect();
        rank.share(&readers, &all.iter().filter_map(of).collect::<Vec<_>>()).unwrap()
    };
    ranks.iter().enumerate().map(each).sum()
}

#[test]
fn ranks_write_what_one_process_writes() {
    for (layout, near) in LAYOUTS.into_iter().flat_map(|layout| [(layout, false), (layout, true)]) {
        let job = Job::new(layout);
        let ranks = if near { job.in_memory() } else { job.ranks() };
        job.open(&ranks);
        let read = if near { share(&ranks) } else { 0 };
        let reports = write(&ranks).into_iter().collect::<Result<Vec<_>>>().unwrap();
        let committed = ranks[0].commit(commit(pieces(&ranks)), &mut |_, _| true).unwrap();
        close(&ranks, true);
        let total: usize = job.bytes.iter().map(Vec::len).sum();
        assert_eq!((committed.bytes, committed.tensors), (total as u64, job.tensors.len()));
        assert_eq!(reports.iter().map(|report| report.bytes).sum::<u64>(), total as u64);
        let exchanged =
            ranks.iter().map(RankSave::exchanged).fold((0, 0), |all, one| (all.0 + one.0, all.1 + one.1));
        assert!(exchanged.0 == exchanged.1 && (exchanged.0 == 0) == matches!(layout, Layout::Copies));
        // Bytes that are relayed or that callbacks copy go by messages.
        assert!((read, exchanged.0) == (0, 0) || (read < exchanged.0 && (read > 0) == near), "{layout:?}");
        let relays = ranks.iter().any(|rank| !rank.duties.relays.is_empty());
        assert_eq!(relays, matches!(layout, Layout::Teams));

        let (one, many) = (job.one(), Checkpoint::open(&job.path()).unwrap());
        let whole = Checkpoint::open(&one).unwrap();
        for (shard, of_one) in many.body().shards.iter().zip(&whole.body().shards) {
            assert_eq!((&shard.crc, &shard.file), (&of_one.crc, &of_one.file), "{layout:?}");
            let read = |path: PathBuf| std::fs::read(path.join(&shard.file)).unwrap();
            assert!(read(job.path()) == read(one.clone()), "{layout:?}: {}", shard.file);
        }
        let damage = many.verify(&options(), &mut |_, _| true).unwrap().1;
        assert!(damage.is_empty() && many.body().shards.len() > 1, "{damage:?}");
        assert_eq!(job.entries(), ["c", "one"]);
    }
}

#[test]
fn a_disk_that_fails_one_rank_fails_the_save() {
    for (broken, errno) in [(0, libc::ENOSPC), (1, libc::EIO), (2, libc::ENOSPC)] {
        for layout in [Layout::Rows, Layout::Columns] {
            let job = Job::new(layout);
            std::fs::create_dir(job.path()).unwrap();
            let faults = Some(FaultPlan::new(3, Fault::Errno(errno), true));
            let rank = |rank| {
                job.rank(rank, Options { faults: faults.clone().filter(|_| rank == broken), ..options() })
            };
            let ranks: Vec<_> = (0..RANKS).map(rank).collect();
            job.open(&ranks);
            let reports = write(&ranks);
            for (rank, report) in (0..).zip(&reports) {
                match report {
                    Err(Error::Io { source, .. }) => {
                        assert_eq!((rank, source.raw_os_error()), (broken, Some(errno)));
                    }
                    Err(Error::Stopped(why)) => assert_eq!(*why, format!("rank {broken} has failed")),
                    other => assert!(rank != broken && other.is_ok(), "{other:?}"),
                }
            }
            // The workspace stays until the coordinator closes, so that other ranks do not fail because it is missing.
            assert_eq!(job.entries().len(), 2, "{:?}", job.entries());
            let broken = &ranks[broken as usize];
            assert!(matches!(broken.pieces(), Err(Error::Misused(_))));
            assert!(matches!(broken.write(&mut |_, _| true), Err(Error::Misused(_))));
            close(&ranks, false);
            assert_eq!(job.entries(), ["c"]);
        }
    }
}

#[test]
fn a_fault_that_passes_is_not_noticed() {
    for fault in [Fault::Errno(libc::EINTR), Fault::Short(100), Fault::Short(5000)] {
        let job = Job::new(Layout::Columns);
        let options = Options { faults: Some(FaultPlan::new(1, fault, false)), ..options() };
        let ranks: Vec<_> = (0..RANKS).map(|rank| job.rank(rank, options.clone())).collect();
        job.open(&ranks);
        assert!(write(&ranks).iter().all(Result::is_ok));
        ranks[0].commit(commit(pieces(&ranks)), &mut |_, _| true).unwrap();
        let checkpoint = Checkpoint::open(&job.path()).unwrap();
        assert!(checkpoint.verify(&options, &mut |_, _| true).unwrap().1.is_empty());
    }
}

type Change<'a> = &'a dyn Fn(&[Piece]) -> Vec<Piece>;

#[test]
fn no_byte_may_be_missing_or_be_there_twice() {
    let lacking = |all: &[Piece]| all[1..].to_vec();
    let twice = |all: &[Piece]| [all, &all[..1]].concat();
    let short = |all: &[Piece]| {
        let last = all.last().copied().unwrap();
        [&all[..all.len() - 1], &[Piece { len: last.len - 1, ..last }]].concat()
    };
    for (word, change) in
        [("no rank has written", &lacking as Change<'_>), ("twice", &twice), ("no rank", &short)]
    {
        let job = Job::new(Layout::Rows);
        let ranks = job.ranks();
        job.open(&ranks);
        assert!(write(&ranks).iter().all(Result::is_ok));
        let error = ranks[0].commit(commit(change(&pieces(&ranks))), &mut |_, _| true).unwrap_err();
        assert!(matches!(&error, Error::Invalid(what) if what.contains(word)), "{error}");
        assert_eq!(job.entries().len(), 0);
    }
}

#[test]
fn what_no_load_would_take_is_not_committed() {
    let job = Job::new(Layout::Copies);
    let ranks = job.ranks();
    job.open(&ranks);
    assert!(write(&ranks).iter().all(Result::is_ok));
    let whole = Commit { per_rank: "[[[[]]]]", ..commit(pieces(&ranks)) };
    assert!(ranks[0].commit(whole, &mut |_, _| true).unwrap_err().to_string().contains("per_rank"));
    assert_eq!(job.entries().len(), 0);
    for seconds in [f64::NAN, f64::INFINITY] {
        let ranks = job.ranks();
        job.open(&ranks);
        assert!(write(&ranks).iter().all(Result::is_ok));
        let figures = Figures { seconds, ..Figures::default() };
        let odd = Commit { figures, ..commit(pieces(&ranks)) };
        let error = ranks[0].commit(odd, &mut |_, _| true).unwrap_err();
        assert!(error.to_string().contains("a time in it is not a number"), "{error}");
        assert_eq!(job.entries().len(), 0);
    }
    for (texts, word) in
        [(["1", "[]", ""], "structure"), (["[]", "{}", ""], "metadata"), (["[]", "[]", "1"], "per_rank")]
    {
        let [structure, metadata, per_rank] = texts;
        let error = ranks[1].check(structure, metadata, per_rank).unwrap_err();
        assert!(error.to_string().contains(word), "{error}");
    }
    ranks[1].check("[]", "[]", "[null]").unwrap();
}

#[test]
fn an_interrupt_and_a_close_end_a_save() {
    let job = Job::new(Layout::Rows);
    let slow = Options { bandwidth_limit: Some(1000), ..options() };
    let ranks = [job.rank(0, slow.clone()), job.rank(1, slow)];
    job.open(&ranks);
    assert!(matches!(ranks[0].write(&mut |_, _| false), Err(Error::Interrupted)));
    let mut closed = false;
    let outcome = std::thread::scope(|scope| {
        let (begun, begins) = channel();
        let rank = &ranks[1];
        let writer = spawn(scope, move || {
            rank.write(&mut |_, _| {
                let _ = begun.send(());
                true
            })
        });
        begins.recv().unwrap();
        assert!(matches!(rank.pieces(), Err(Error::Misused(IN_USE))));
        rank.close(false);
        closed = true;
        writer.join().unwrap()
    });
    assert!(closed && matches!(outcome, Err(Error::Interrupted | Error::Stopped(_))), "{outcome:?}");
    ranks[0].close(false);
    assert_eq!(job.entries().len(), 0);
}

#[test]
fn steps_out_of_order_are_refused() {
    let job = Job::new(Layout::Rows);
    let progress = &mut |_, _| true;
    let path = job.path();
    assert!(matches!(job.rank(0, options()).allocate(progress), Err(Error::Misused(ORDER))));
    assert!(matches!(job.rank(0, options()).write(progress), Err(Error::Misused(ORDER))));
    assert!(matches!(job.rank(0, options()).commit(commit(vec![]), progress), Err(Error::Misused(ORDER))));
    let rank = job.rank(0, options());
    rank.create(&path, true, progress).unwrap();
    assert!(matches!(rank.create(&path, true, progress), Err(Error::Misused(ORDER))));
    let rank = job.rank(1, options());
    rank.close(false);
    rank.close(true);
    assert!(matches!(rank.join(&path, OsStr::new("x")), Err(Error::Misused(ORDER))));
    assert!(matches!(rank.mail().pack(0), Err(Error::Stopped(_))));
    assert_eq!(job.entries().len(), 0);
}

#[test]
fn each_file_is_allocated_by_one_rank_and_all_ranks_take_part() {
    for layout in LAYOUTS {
        let job = Job::new(layout);
        let ranks = job.ranks();
        let workspace = job.meet(&ranks);
        let files = || std::fs::read_dir(&workspace).unwrap().count() - 1;
        let mut counts = vec![files()];
        for rank in &ranks[1..] {
            let before = files();
            rank.allocate(&mut |_, _| true).unwrap();
            counts.push(files() - before);
        }
        let written: Vec<_> = job.table.plan.written().collect();
        assert_eq!(counts.iter().sum::<usize>(), written.len());
        assert!(counts.iter().max().unwrap() - counts.iter().min().unwrap() <= 1, "{counts:?}");
        let length = |shard: &Shard| std::fs::metadata(workspace.join(&shard.file)).unwrap().len();
        assert!(written.iter().all(|shard| length(shard) == shard.bytes));
        let error = ranks[0].allocate(&mut |_, _| true).unwrap_err();
        assert_eq!(error.errno(), Some(libc::EEXIST), "{error}");
        assert_eq!(job.entries().len(), 0);
    }
}

#[test]
fn a_rank_that_does_not_see_the_workspace_says_so() {
    let job = Job::new(Layout::Rows);
    let coordinator = job.rank(0, options());
    let name = coordinator.create(&job.path(), true, &mut |_, _| true).unwrap();
    let elsewhere = tempfile::tempdir().unwrap();
    for path in [elsewhere.path().join("c"), elsewhere.path().join("none/c")] {
        let error = job.rank(1, options()).join(&path, &name).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOENT));
        assert!(error.to_string().contains(path.parent().unwrap().to_str().unwrap()), "{error}");
    }
}

#[test]
fn a_late_rank_does_not_touch_a_published_checkpoint() {
    let job = Job::new(Layout::Copies);
    let (ranks, late) = (job.ranks(), job.rank(1, options()));
    let workspace = job.open(&ranks);
    late.join(&job.path(), workspace.file_name().unwrap()).unwrap();
    assert!(write(&ranks).iter().all(Result::is_ok));
    ranks[0].commit(commit(pieces(&ranks)), &mut |_, _| true).unwrap();
    let changed = || {
        let changed = |file: &str| std::fs::metadata(job.path().join(file)).unwrap().modified().unwrap();
        Checkpoint::open(&job.path()).unwrap().body().shards.iter().map(|shard| changed(&shard.file)).max()
    };
    let before = changed();
    // The descriptor of the directory now belongs to the published checkpoint.
    let error = late.write(&mut |_, _| true).unwrap_err();
    assert!(error.to_string().contains("it is sealed"), "{error}");
    assert_eq!(changed(), before);
}

#[test]
fn what_was_replaced_stays_until_the_save_is_closed() {
    let job = Job::new(Layout::Copies);
    for beside in [0, 1] {
        let ranks = job.ranks();
        job.open(&ranks);
        assert!(write(&ranks).iter().all(Result::is_ok));
        ranks[0].commit(commit(pieces(&ranks)), &mut |_, _| true).unwrap();
        assert!(Checkpoint::open(&job.path()).is_ok());
        assert_eq!(job.entries().len(), 1 + beside);
        close(&ranks, true);
        assert_eq!(job.entries(), ["c"]);
    }
}

#[test]
fn a_rank_that_lacks_a_part_is_refused() {
    let job = Job::new(Layout::Rows);
    let held = Held::new((1..job.tensors.len()).map(|tensor| ((tensor, 0), pull(job.local(1, tensor)))));
    let error = RankSave::new(Arc::clone(&job.table), 1, held, options(), None).unwrap_err();
    assert!(error.to_string().contains("part 0 of tensor 0"), "{error}");
    let held = Held::new((0..job.tensors.len()).map(|tensor| ((tensor, 0), pull(vec![]))));
    assert!(RankSave::new(Arc::clone(&job.table), RANKS, held, options(), None).is_err());
}

#[test]
fn what_each_rank_has_for_itself_and_other_files_are_committed() {
    let job = Job::new(Layout::Copies);
    let ranks = job.ranks();
    job.open(&ranks);
    assert!(write(&ranks).iter().all(Result::is_ok));
    let files: &[(&str, &[u8])] = &[("config.json", b"{}")];
    let whole = Commit { per_rank: r#"[["list",1],7]"#, files, ..commit(pieces(&ranks)) };
    ranks[0].commit(whole, &mut |_, _| true).unwrap();
    let body = Checkpoint::open(&job.path()).unwrap();
    assert_eq!(body.body().per_rank.as_ref().unwrap().get(), r#"[["list",1],7]"#);
    assert_eq!((body.body().saved.threads, body.body().saved.seconds), (2, 0.5));
    assert_eq!(std::fs::read(job.path().join("config.json")).unwrap(), b"{}");
    assert!(std::fs::metadata(job.path().join(manifest::FILE)).unwrap().len() > 0);
}

#[test]
fn a_unit_keeps_its_messages_until_it_is_written() {
    let job = Job::new(Layout::Columns);
    let ranks = job.ranks();
    job.open(&ranks);
    let stage = ranks[0].stage().unwrap();
    let Stage::Open(_, work) = &*stage else { panic!("it is open") };
    assert!(!work.is_ready(0).unwrap(), "no message has arrived");
    // The bytes of the first tensor of the shard that are in the unit.
    let Unit { shard, start, end } = work.unit(0);
    let placement = job.table.plan.shards[shard].placements[0];
    let bytes = start.max(placement.offset) - placement.offset..end.min(placement.end()) - placement.offset;
    let expected = &job.bytes[placement.tensor][bytes.start as usize..bytes.end as usize];
    for peer in [1, 2] {
        for (message, (to, _)) in ranks[peer].mail().outgoing().enumerate().filter(|(_, (to, _))| *to == 0) {
            ranks[peer].mail().pack(message).unwrap();
            let mut from_peer =
                ranks[0].mail().incoming().enumerate().filter(|(_, (from, _))| *from == peer as u32);
            let there =
                from_peer.nth(ranks[peer].mail().outgoing().take(message).filter(|(to, _)| *to == 0).count());
            let there = there.unwrap().0;
            ranks[to as usize].mail().admit(there).unwrap();
            carry(ranks[peer].mail(), message, ranks[0].mail(), there);
            ranks[0].mail().arrived(there).unwrap();
        }
    }
    assert!(work.is_ready(0).unwrap());
    let copy = || {
        let mut to = vec![0; expected.len()];
        work.copy(0, placement.tensor, bytes.start, &mut to).map(|sum| (sum, to))
    };
    for again in [true, true, false] {
        assert!(copy().unwrap() == (crate::format::checksum::Pair::of(expected), expected.to_vec()));
        work.assembled(0, 0, again);
        assert_eq!(work.taken(0).is_empty(), !again);
    }
}

#[test]
fn the_ranks_of_a_node_share_what_is_in_flight_on_storage_of_several_machines() {
    let share = |local: &'static str, reach| {
        let environment = crate::Environment::of(|name| (name == "LOCAL_WORLD_SIZE").then(|| local.into()));
        in_flight(&Options { environment, ..Options::default() }, reach)
    };
    assert_eq!([share("8", Reach::Machine), share("8", Reach::Unknown)], [None, Some(128 << 20)]);
    assert_eq!([share("", Reach::Everywhere), share("1", Reach::Unknown)], [Some(1 << 30); 2]);
}
