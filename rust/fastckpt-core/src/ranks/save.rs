//! The save of one rank. All ranks have the same [`Table`]. The coordinator creates the workspace and commits, and the
//! other ranks join the workspace. Each rank allocates its share of the files. Then it writes its ranges of the shards
//! and makes them durable, while its [`Mail`] exchanges the bytes that one rank has and another one writes.

use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Instant;

use super::base::{Prepared, RankBase};
use super::contents;
use super::held::Held;
use super::mail::{Fill, Mail};
use super::near::{self, Near};
use super::pieces;
use super::replicas::{Replicas, SumOf};
use super::table::Table;
use super::work::Ranges;
use crate::commit::{Displaced, Reach, Workspace, reach};
use crate::engine::choice::Choice;
use crate::engine::job::Progress;
use crate::engine::options::Options;
use crate::engine::report::{Linked, Report};
use crate::engine::run::run;
use crate::error::{Error, Result};
use crate::format::checksum::Filled;
use crate::format::limits::MAX_BYTES;
use crate::save::base::LinkedShards;
use crate::save::job::WriteJob;
use crate::save::shards::allocate;
use crate::save::work::Work as _;
use crate::save::{Committed, Figures, Finish, check_size, empty_body, finish, shard_entry, since_1970};
use crate::share::Piece;
use crate::share::{Depth, Duties, Message, Purpose};
use crate::telemetry::{self, Kind, Operation, Phase};

/// What the coordinator passes to the commit after all ranks have written.
#[derive(Debug)]
pub struct Commit<'a> {
    /// The checksums of all ranks.
    pub pieces: Vec<Piece>,
    /// The structure of the state: a JSON array of tokens.
    pub structure: &'a str,
    /// The caller's metadata: also a JSON array of tokens.
    pub metadata: &'a str,
    /// The states that ranks saved for themselves, also a JSON array of tokens; empty if there are none.
    pub per_rank: &'a str,
    /// Further files for the checkpoint's directory, by name and content.
    pub files: &'a [(&'a str, &'a [u8])],
    /// How the ranks wrote.
    pub figures: Figures,
}

/// A save that has begun.
#[derive(Debug)]
struct Open {
    workspace: Workspace,
    operation: Operation,
    /// When the save began, in seconds since 1970.
    created: f64,
}

#[derive(Debug)]
enum Stage {
    /// The rank has not created or joined the workspace yet.
    New(Ranges),
    Open(Open, Ranges),
    /// The rank has written. The checksums are `None` if it failed. The workspace stays even then, because other
    /// ranks may still write to it, and would take its absence for a failure of their own.
    Written(Open, Option<Vec<Piece>>),
    /// The save was committed or closed, or another step failed.
    Ended,
}

/// The save of one rank. A method refuses while another method runs, except [`RankSave::close`], which stops it.
#[derive(Debug)]
pub struct RankSave {
    table: Arc<Table>,
    rank: u32,
    duties: Arc<Duties>,
    held: Arc<Held>,
    mail: Arc<Mail>,
    options: Options,
    closing: AtomicBool,
    stage: Mutex<Stage>,
    /// The files that the coordinator has linked, and its workspace if it has been created.
    prepared: Mutex<Prepared>,
    /// The checkpoint that the coordinator has replaced.
    displaced: Mutex<Option<Displaced>>,
}

/// Bytes that the ranks of a node together have in flight on storage that other nodes also use: 10 ms at 100 GB/s.
const IN_FLIGHT: u64 = 1 << 30;

/// The maximum number of bytes that a rank has in flight: its share, unless only this machine uses the storage.
fn in_flight(options: &Options, reach: Reach) -> Option<u64> {
    (reach != Reach::Machine).then(|| IN_FLIGHT / options.ranks().local.max(1) as u64)
}

/// The mail of a rank. Its messages are packed from the rank's parts.
fn mail(table: &Arc<Table>, duties: &Arc<Duties>, held: &Arc<Held>) -> Mail {
    let envelopes = |messages: &[&Message]| messages.iter().map(|m| (m.peer, m.bytes)).collect();
    let fill: Fill = {
        let (duties, held) = (Arc::clone(duties), Arc::clone(held));
        Box::new(move |mail, message, to| {
            let mut sum = Filled::default();
            held.pack_all(&duties.boxes[message].items, Some(mail), to, |filled| sum.reached(filled))?;
            Ok(sum.all(to))
        })
    };
    let (files, tensors) = (Arc::clone(table), Arc::clone(table));
    let (outgoing, incoming) = duties.lanes(Purpose::Save);
    let contents = contents::of(
        &table.share,
        &incoming,
        move |shard| files.plan.shards[shard].file.clone(),
        move |tensor| tensors.tensors[tensor].name.clone(),
    );
    Mail::new(envelopes(&outgoing), envelopes(&incoming), contents, Some(fill))
        .relaying(std::iter::empty(), duties.relays.len())
}

const IN_USE: &str = "the save of this rank is in use";
const ORDER: &str = "create or join once, then write once, then commit";

impl RankSave {
    /// The save of `rank`, whose memory is `held`. Refuses parts that differ from the table. If files are linked,
    /// `base` made the table, and the coordinator's `base` has the linked files.
    pub fn new(
        table: Arc<Table>,
        rank: u32,
        held: Held,
        options: Options,
        base: Option<&RankBase>,
    ) -> Result<Self> {
        let known = base.and_then(|base| base.duties(&table, rank));
        let find = || table.share.duties(rank, Purpose::Save).map(Arc::new);
        let duties = known.map_or_else(find, Ok)?;
        held.check(&duties)?;
        let held = Arc::new(held);
        let mail = Arc::new(mail(&table, &duties, &held));
        let work = Ranges::new(&table, &duties, &held, &mail)?;
        let (closing, stage) = (AtomicBool::new(false), Mutex::new(Stage::New(work)));
        let (prepared, displaced) = (base.map(RankBase::give).unwrap_or_default().into(), Mutex::default());
        Ok(Self { table, rank, duties, held, mail, options, closing, stage, prepared, displaced })
    }

    fn prepared(&self) -> MutexGuard<'_, Prepared> {
        self.prepared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The mail of this rank.
    #[must_use]
    pub const fn mail(&self) -> &Arc<Mail> {
        &self.mail
    }

    fn stage(&self) -> Result<MutexGuard<'_, Stage>> {
        match self.stage.try_lock() {
            Ok(stage) => Ok(stage),
            Err(TryLockError::WouldBlock) => Err(Error::Misused(IN_USE)),
            Err(TryLockError::Poisoned(poisoned)) => Ok(poisoned.into_inner()),
        }
    }

    /// Runs `step`, which replaces the current stage with the next one. An error ends the save, and stops its mail.
    fn step<T>(&self, step: impl FnOnce(Stage, &mut Stage) -> Result<T>) -> Result<T> {
        let mut stage = self.stage()?;
        let before = std::mem::replace(&mut *stage, Stage::Ended);
        step(before, &mut stage).inspect_err(|error| self.mail.stop(&error.to_string()))
    }

    fn begin(&self, path: &Path, workspace: impl FnOnce() -> Result<Workspace>) -> Result<Open> {
        let created = since_1970();
        let operation = self.options.operation(Kind::Save, path);
        let workspace = workspace().inspect_err(|error| operation.end(Err(error.errno())))?;
        Ok(Open { workspace, operation, created })
    }

    /// Sums the cells that this rank and other ranks hold. Calls `sum_of` for whole parts that are not in host memory.
    pub fn replicas(&self, depth: Depth, sum_of: SumOf<'_>, progress: Progress<'_>) -> Result<Replicas> {
        let progress = &mut self.until_closed(progress);
        Replicas::new(&self.table, self.rank, &self.held, (depth, sum_of), &self.options, progress)
    }

    /// Up to about `most` bytes of a cell of `replicas`, given by tensor, first byte and number. All ranks that hold
    /// the cell return the same bytes.
    pub fn compared(&self, replicas: &Replicas, cell: (usize, u64, u32), most: u64) -> Result<Vec<u8>> {
        replicas.bytes(&self.held, cell, most)
    }

    /// Refuses a state whose manifest would be too large, and texts that are not JSON arrays of tokens. For the
    /// coordinator, before any rank writes.
    pub fn check(&self, structure: &str, metadata: &str, per_rank: &str) -> Result<()> {
        let Table { plan, tensors, .. } = &*self.table;
        let texts = [structure, metadata, per_rank];
        empty_body(0.0, plan.block_size, texts)?;
        check_size(plan, tensors, texts, MAX_BYTES)
    }

    /// For the coordinator: creates the workspace, with its linked files and its share of the other files. Returns the
    /// workspace's name, for the other ranks to join.
    pub fn create(&self, path: &Path, overwrite: bool, progress: Progress<'_>) -> Result<OsString> {
        self.step(|stage, next| {
            let Stage::New(work) = stage else { return Err(Error::Misused(ORDER)) };
            let made = self.prepared().workspace.take();
            let open = self.begin(path, || made.map_or_else(|| Workspace::create(path, overwrite), Ok))?;
            LinkedShards::name_linked_shards(&open.workspace, &self.table.plan)
                .and_then(|()| self.allocate_own(&open.workspace, progress))
                .inspect_err(|error| open.operation.end(Err(error.errno())))?;
            let name = open.workspace.temporary().to_owned();
            *next = Stage::Open(open, work);
            Ok(name)
        })
    }

    /// For all other ranks: opens the workspace `name` that the coordinator created for `path`.
    pub fn join(&self, path: &Path, name: &OsStr) -> Result<()> {
        self.step(|stage, next| {
            let Stage::New(work) = stage else { return Err(Error::Misused(ORDER)) };
            *next = Stage::Open(self.begin(path, || Workspace::join(path, name))?, work);
            Ok(())
        })
    }

    /// For all other ranks, after they have joined: allocates their shares. All must do so before any rank writes.
    pub fn allocate(&self, progress: Progress<'_>) -> Result<()> {
        self.step(|stage, next| {
            let Stage::Open(open, work) = stage else { return Err(Error::Misused(ORDER)) };
            self.allocate_own(&open.workspace, progress)
                .inspect_err(|error| open.operation.end(Err(error.errno())))?;
            *next = Stage::Open(open, work);
            Ok(())
        })
    }

    /// Creates this rank's share of the files, with their final sizes. All shares have about the same number of files.
    /// If there are fewer files than ranks, the ranks with a file are evenly spaced, and therefore on different hosts.
    fn allocate_own(&self, workspace: &Workspace, progress: Progress<'_>) -> Result<()> {
        let (rank, ranks) = (self.rank as usize, self.table.share.ranks() as usize);
        let written = self.table.plan.written();
        let count = written.clone().count();
        let own = written.enumerate().filter(|&(number, _)| number * ranks / count == rank);
        allocate(own.map(|(_, shard)| shard), workspace, &mut self.until_closed(progress))
    }

    /// For each of the ranks `mates` of this host: the addresses of the parts that it reads in this rank's memory, and
    /// the number of addresses that this rank gets from it. If the addresses are zeros, the bytes go by messages.
    #[must_use]
    pub fn addresses(&self, mates: &[u32]) -> Vec<(u32, Vec<u64>, usize)> {
        let Duties { boxes, io, .. } = &*self.duties;
        let each = |&mate: &u32| (mate, near::addresses(boxes, mate, &self.held), near::expected(io, mate));
        mates.iter().map(each).collect()
    }

    /// Makes ranks of the same host read bytes directly instead of by messages. `given` are the ranks that read this
    /// rank's memory. `taken` are the ranks whose memory this rank reads, each with its process and the addresses that
    /// it gave. Call this before messages travel. Returns the number of bytes that this rank reads.
    pub fn share(&self, given: &HashSet<u32>, taken: &[(u32, u32, Vec<u64>)]) -> Result<u64> {
        self.step(|mut stage, next| {
            let (Stage::New(work) | Stage::Open(_, work)) = &mut stage else {
                return Err(Error::Misused(ORDER));
            };
            let Duties { boxes, io, relays, .. } = &*self.duties;
            let mut near = Near::default();
            for (peer, process, addresses) in taken {
                near.add(*peer, *process, io, addresses);
            }
            let (sent, read) = (
                near::left_out(boxes, |peer| given.contains(&peer)),
                near::left_out(io, |peer| near.has(peer)),
            );
            let bytes = read.clone().map(|message| io[message].bytes).sum();
            self.mail.leave_out(sent, read.map(|message| relays.len() + message));
            work.read_near(near);
            *next = stage;
            Ok(bytes)
        })
    }

    /// Writes this rank's ranges and makes them durable. Waits for the messages with bytes for these ranges. Bytes that
    /// other ranks need from this rank may still be on their way when this returns.
    pub fn write(&self, progress: Progress<'_>) -> Result<Report> {
        self.step(|stage, next| {
            let Stage::Open(open, work) = stage else { return Err(Error::Misused(ORDER)) };
            match self.write_to(&open, &work, &mut self.until_closed(progress)) {
                Ok((report, pieces)) => {
                    *next = Stage::Written(open, Some(pieces));
                    Ok(report)
                }
                Err(error) => {
                    open.operation.end(Err(error.errno()));
                    *next = Stage::Written(open, None);
                    Err(error)
                }
            }
        })
    }

    fn write_to(&self, open: &Open, work: &Ranges, progress: Progress<'_>) -> Result<(Report, Vec<Piece>)> {
        let begin = Instant::now();
        let in_flight = in_flight(&self.options, reach(open.workspace.directory()));
        let options = Options { in_flight, ..self.options.clone() };
        let choice = Choice::new(&options, work.total());
        let job = WriteJob::new(work, &open.workspace, &choice, &options, begin);
        let planned = begin.elapsed().as_secs_f64();
        let block_size = self.table.plan.block_size;
        let ran = run(&job, &choice, &options, block_size, &open.operation, progress)?;
        open.operation.phase(Phase::Fsync);
        let seconds = begin.elapsed().as_secs_f64();
        let written = (job.written.load(Ordering::Relaxed) as f64 / 1e9).clamp(planned, seconds);
        let report = Report {
            bytes: work.total(),
            phases: vec![("plan", planned), ("write", written - planned), ("fsync", seconds - written)],
            seconds,
            ran,
            warnings: Vec::new(),
            shards: work.files(),
            tensors: work.tensors(),
            linked: Linked::default(),
        };
        Ok((report, work.pieces()))
    }

    /// The number of bytes that this rank sends to others, and the number that it receives.
    #[must_use]
    pub fn exchanged(&self) -> (u64, u64) {
        let sum = |messages: &[&Message]| messages.iter().map(|message| message.bytes).sum();
        let (outgoing, incoming) = self.duties.lanes(Purpose::Save);
        (sum(&outgoing), sum(&incoming))
    }

    /// The number of ranks with which this rank exchanges bytes, the ranks of a team, and the bytes of a grain.
    pub fn teams(&self) -> Result<(usize, u32, u64)> {
        let (outgoing, incoming) = self.duties.lanes(Purpose::Save);
        let peers: HashSet<u32> = outgoing.iter().chain(&incoming).map(|message| message.peer).collect();
        Ok((peers.len(), self.table.share.team_size()?, self.table.share.grain()))
    }

    /// The checksums of the ranges that this rank wrote.
    pub fn pieces(&self) -> Result<Vec<Piece>> {
        match &*self.stage()? {
            Stage::Written(_, Some(pieces)) => Ok(pieces.clone()),
            _ => Err(Error::Misused("this rank has not written")),
        }
    }

    /// For the coordinator, after all ranks have written: checks that they wrote every byte, completes the workspace
    /// and gives it the checkpoint's name. Until then, a failure leaves the old checkpoint unchanged. [`Self::close`]
    /// removes the replaced checkpoint. The coordinator calls it after all ranks know that the new one is there,
    /// because removal may take long.
    pub fn commit(&self, commit: Commit<'_>, progress: Progress<'_>) -> Result<Committed> {
        self.step(|stage, _| {
            let Stage::Written(open, Some(_)) = stage else { return Err(Error::Misused(ORDER)) };
            let Open { workspace, operation, created } = open;
            let outcome =
                self.publish(workspace, &operation, created, commit, &mut self.until_closed(progress));
            operation.end(telemetry::outcome(&outcome));
            outcome
        })
    }

    fn publish(
        &self,
        workspace: Workspace,
        operation: &Operation,
        created: f64,
        commit: Commit<'_>,
        progress: Progress<'_>,
    ) -> Result<Committed> {
        let begin = Instant::now();
        operation.phase(Phase::Commit);
        let Table { plan, tensors, share, .. } = &*self.table;
        let Commit { pieces, structure, metadata, per_rank, files, figures } = commit;
        let sums = share.cover_all(pieces)?;
        let shards = plan
            .written()
            .map(|shard| shard_entry(shard, pieces::whole_shard(shard, plan.block_size, &sums)))
            .collect();
        let entries = tensors.iter().zip(&plan.places).zip(&sums);
        let entries = entries
            .filter(|((_, place), _)| plan.shards[place.0].linked.is_none())
            .map(|((tensor, &place), sums)| pieces::entry(tensor, place, plan.block_size, sums))
            .collect();
        let body = empty_body(created, plan.block_size, [structure, metadata, per_rank])?;
        let (linked, written) = (&self.prepared().linked, (shards, entries));
        let end = Finish { body, plan, linked, written, joint: true, files, figures, unsynced: None };
        let (committed, displaced) = finish(workspace, end, operation, progress)?;
        *self.displaced.lock().unwrap_or_else(PoisonError::into_inner) = Some(displaced);
        Ok(Committed { seconds: begin.elapsed().as_secs_f64(), ..committed })
    }

    /// A `progress` that also ends the operation when the save is closed.
    fn until_closed<'a>(&'a self, progress: Progress<'a>) -> impl FnMut(u64, u64) -> bool + 'a {
        |done, total| !self.closing.load(Ordering::Relaxed) && progress(done, total)
    }

    /// Stops all threads and the mail.
    pub fn stop(&self) {
        self.closing.store(true, Ordering::Relaxed);
        self.mail.end("the save has ended");
    }

    /// Ends the save: stops it and leaves the workspace. The coordinator's workspace is removed if it was not
    /// committed; if it was, the replaced checkpoint is removed. When this returns, nothing reads this rank's memory
    /// any more. `committed` is whether the coordinator has committed, for the live counters.
    pub fn close(&self, committed: bool) {
        self.stop();
        self.prepared().workspace = None;
        let mut stage = self.stage.lock().unwrap_or_else(PoisonError::into_inner);
        if let Stage::Written(open, Some(_)) = std::mem::replace(&mut *stage, Stage::Ended)
            && committed
        {
            open.operation.end(Ok(()));
        }
        drop(stage);
        let displaced = self.displaced.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(displaced);
    }
}

#[cfg(test)]
pub(in crate::ranks) mod tests;
