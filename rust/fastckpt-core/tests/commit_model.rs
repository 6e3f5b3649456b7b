//! An exhaustive model of the commit protocol (`src/commit/`, `src/read/`): every order of the steps of two savers, a
//! later saver, a sweeper, a loader and a user, with a kill at every step.
//!
//! **State**: a parent directory that gives names to directories, and processes that remember what they saw. One step
//! is one operation on the file system. Writing shards and the manifest's content counts as one, as do the last two of
//! a removal. The search is breadth first over all interleavings, so that a counterexample is the shortest.
//! - A saver builds (`Workspace::create`, `furnish`: `Mkdir`, `Create`), looks at the target (`take_the_name`,
//!   `taken_aside`: `Look` to `AdoptCarry`), takes its name (`replace`, `give_back`: `Swap` to `BackAgain`;
//!   `replace_in_two_steps`: `Swap`, `Rename` to `TakenClaim`), and removes what it displaced (`leftovers::remove`: a
//!   claim, `First` to `Unclaim`). The later saver begins after all others end, and sweeps everything before and
//!   after its save.
//! - A sweeper examines a single leftover (`leftovers::sweep`, `examine`, `is_superseded`: `Pick` to `OldClaim`).
//! - A loader opens by name and reads by descriptor (`Open` to `Named`), or recovers (`recover`: `Recover` to
//!   `PutBack`).
//! - The user moves away or removes what has the name, or puts another directory there.
//!
//! **Variants**: with and without `RENAME_EXCHANGE`; up to two kills; death that cannot be proven; one wrong judgement
//! of death, because locks can mislead; look-ups with outdated answers (NFS).
//!
//! **Not modelled**: the directories above, which a save makes before its first step; files that a save was given, which
//! it seals like shards and does not carry over; power cuts (the fault campaign replays them; the model takes each
//! rename as durable), failing operations, the locks themselves (a judgement is right or wrong), the 30 s and 5 s
//! deadlines (they may pass at any moment), look-ups that are stale by more than one generation, listings that tear.
//!
//! **Accepted**, because each needs several coincidences:
//! - A saver adopts an old checkpoint whose owner lives and publishes, is killed before it notices, and the user
//!   removes the name: the old checkpoint comes back (`State::published`).
//! - The user's directory takes the name between the two renames: the old checkpoint stays under `.old-`, whole but
//!   not found.
//! - A wrong judgement removes the workspace of a save between its two renames: the same follows, and the next save
//!   does not carry over from there. If the sweeper is killed meanwhile, and the workspace held a directory of the
//!   user's, a third sweep removes it.
//! - The user's directory is exchanged back while a rival publishes, and the save is killed, or wrongly judged dead,
//!   between its two exchanges: the rival's checkpoint is swept.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::enum_glob_use,
    clippy::struct_excessive_bools,
    clippy::semicolon_if_nothing_returned,
    clippy::match_same_arms,
    reason = "a table of steps reads best as it is; all numbers are small"
)]

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// The name of a directory. A claimed directory has a unique name, so `Del` never clashes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
enum At {
    #[default]
    Gone,
    Away,
    Name,
    Del,
    Tmp(u8),
    Old(u8, u8),
}
use At::{Away, Del, Gone, Name, Old, Tmp};

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
struct Dir {
    at: At,
    /// 0: no manifest, 1: an empty one, 2: a whole one.
    manifest: u8,
    shards: bool,
    /// A file of another program beside the shards.
    foreign: bool,
    /// The directory was taken over from another saver, which may still publish.
    adopted: bool,
    /// When the manifest was written. Recovery determines the order only from this.
    age: u8,
    /// When the directory took the name; 0: never.
    rank: u8,
}

/// The directories: three workspaces, the old checkpoint, the user's directory.
const LATE: usize = 2;
const OLD: usize = 3;
const USERS: usize = 4;
/// The processes besides the savers. A saver has the number of its workspace.
const SWEEPER: usize = 3;
const LOADER: usize = 4;
const USER: usize = 5;
const NAMES: [&str; 6] = ["A", "B", "late", "sweeper", "loader", "user"];
const NONE: u8 = 9;

/// The next step of a process. One step is one operation on the file system.
#[rustfmt::skip]
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Pc {
    // A saver builds, looks at the target, takes its name (by exchange or in two steps), and clears away.
    Mkdir, Create, Fill,
    Look, Check, Refuse, Carry, Again, Candidates, Adopt, AdoptCarry,
    Swap, Inspect, Other, Back, BackCheck, BackAgain,
    Rename, Undo, Taken, TakenClaim, Sync, Displaced, After,
    Fail, FailClaim,
    // A claimed directory is removed or given back.
    First, Rest, Unclaim,
    // The steps of a sweep.
    Pick, Judge, TmpLook, TmpRmdir, TmpClaim, OldLook, OldName, OldClaim,
    // The steps of a load.
    Open, Manifest, Shards, Named, Recover, Dead, Relist, PutBack,
    // The step of the user.
    Act,
    Done,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum End {
    Running,
    Good,
    Failed,
    Killed,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Proc {
    pc: Pc,
    then: Pc,
    end: End,
    /// Saver: the old checkpoint, which has the name or was adopted. Loader: the directory that it reads.
    old: u8,
    /// The directory that the process works on.
    x: u8,
    /// The temporary name that the process works on.
    from: At,
    /// A saver's attempt, a sweeper's remaining rounds, or the user's next action.
    n: u8,
    /// Saver: the old checkpoint is under `.old-`. Sweeper: its first listing had an `.old-`.
    hold: bool,
}

const DONE: Proc =
    Proc { pc: Pc::Done, then: Pc::Done, end: End::Good, old: NONE, x: NONE, from: Gone, n: 0, hold: false };

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    dirs: [Dir; 5],
    procs: [Proc; 6],
    /// The directory that had the name before, for look-ups that a cache answers.
    before: u8,
    /// The checkpoints that had been published when the user removed the name.
    removed: u8,
    success: u8,
    crashes: u8,
    wrong: u8,
    /// The user's directory exists. The user removes directories file by file.
    put: bool,
    spoilt: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Act {
    /// `mv NAME elsewhere`
    MoveAway,
    /// `rm -r NAME`, in three steps
    RmFiles,
    RmManifest,
    RmDir,
    /// `mv theirs NAME`
    Put,
}

/// The rules of the protocol. Each can be turned off, and then the model must find a violation.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Rule {
    /// A directory gets a unique name before it is removed.
    ClaimByRename,
    /// A claimed directory is compared with the examined one, and renamed back if it differs.
    CompareClaimed,
    /// An `.old-` is put back or adopted only while its successor's `.tmp-` exists.
    Partner,
    /// The displaced directory is compared with the examined one.
    InodeAfterSwap,
    /// After an exchange back, the directory under `.tmp-` must be the saver's.
    OwnAfterBack,
    /// A `.tmp-` is not swept while its `.old-` exists. The `.old-` is looked up after the judgement of death.
    SpareTmpWithOld,
    JudgeThenList,
    /// A directory under `.tmp-` or `.old-` without a manifest is foreign unless it is empty.
    OnlyOurs,
    /// The manifest is made before anything else.
    ManifestFirstIn,
    /// The name of an `.old-` is used once.
    Attempts,
    /// An `.old-` is swept if a fresh look-up finds that a later checkpoint has the name.
    OldInode,
    FreshName,
    CheckpointHasName,
    /// A saver that finds the name free takes over the `.old-`.
    Adopt,
    /// A loader renames an `.old-` back only with a proof of death.
    ProofBeforePutBack,
    /// Before the swap, a saver checks that the directory from which it carried over still has the name.
    LookBeforeSwap,
    /// A save also sweeps after its commit.
    SweepAfter,
    /// A loader checks afresh whether the incomplete directory has the name.
    FreshReader,
    /// A checkpoint is missing only if one listing shows neither the name nor an `.old-`.
    OneLook,
}
use Rule::*;

#[derive(Clone, Debug, Default)]
struct Scenario {
    exchange: bool,
    old: bool,
    savers: usize,
    sweeper: u8,
    loader: bool,
    late: bool,
    user: &'static [Act],
    crashes: u8,
    wrong: u8,
    /// Death can be proven.
    proof: bool,
    stale: bool,
    off: Vec<Rule>,
}

impl Scenario {
    fn new(exchange: bool) -> Self {
        Self { exchange, old: true, savers: 2, proof: true, ..Self::default() }
    }

    fn on(&self, rule: Rule) -> bool {
        !self.off.contains(&rule)
    }

    fn start(&self) -> State {
        let mut dirs = [Dir::default(); 5];
        if self.old {
            let whole = Dir { manifest: 2, shards: true, foreign: true, ..Dir::default() };
            dirs[OLD] = Dir { at: Name, age: 1, rank: 1, ..whole };
        }
        let mut procs = [DONE; 6];
        for (p, begins, pc) in [
            (0, self.savers > 0, Pc::Mkdir),
            (1, self.savers > 1, Pc::Mkdir),
            (LATE, self.late, Pc::Pick),
            (SWEEPER, self.sweeper > 0, Pc::Pick),
            (LOADER, self.loader, Pc::Open),
            (USER, !self.user.is_empty(), Pc::Act),
        ] {
            if begins {
                procs[p] = Proc { pc, end: End::Running, ..DONE };
            }
        }
        procs[SWEEPER].n = self.sweeper;
        State {
            dirs,
            procs,
            before: NONE,
            removed: 0,
            success: 0,
            crashes: self.crashes,
            wrong: self.wrong,
            put: false,
            spoilt: 0,
        }
    }
}

/// The saver to which a temporary name belongs.
fn owner(at: At) -> usize {
    match at {
        Tmp(q) | Old(q, _) => q as usize,
        _ => USER,
    }
}

/// The result of a load that runs alone from here.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum View {
    Missing,
    Users,
    Corrupt(usize),
    Found(usize),
}

impl State {
    fn at(&self, at: At) -> Option<usize> {
        self.dirs.iter().position(|dir| dir.at == at)
    }

    fn has_old(&self, q: usize) -> bool {
        self.dirs.iter().any(|dir| matches!(dir.at, Old(of, _) if of as usize == q) && dir.manifest > 0)
    }

    fn empty(&self, x: usize) -> bool {
        let dir = &self.dirs[x];
        x != USERS && dir.manifest == 0 && !dir.shards && !dir.foreign
    }

    /// Whether the directory with the name is known to be later than the one at `.old-`.
    fn supersedes(&self, sc: &Scenario, named: usize, x: usize) -> bool {
        let (named, old) = (&self.dirs[named], &self.dirs[x]);
        !sc.on(CheckpointHasName) || named.manifest == 2 && named.age >= old.age
    }

    /// Renames a directory. `to` is free.
    fn mv(&mut self, x: usize, to: At) {
        let named = self.at(Name);
        self.dirs[x].at = to;
        if self.at(Name) != named {
            self.before = named.map_or(NONE, |x| x as u8);
        }
    }

    fn swap(&mut self, x: usize, y: usize) {
        let named = self.at(Name);
        let (a, b) = (self.dirs[x].at, self.dirs[y].at);
        self.dirs[x].at = b;
        self.dirs[y].at = a;
        self.before = named.map_or(NONE, |x| x as u8);
    }

    fn publish(&mut self, p: usize) {
        self.dirs[p].rank = self.dirs.iter().map(|dir| dir.rank).max().unwrap() + 1;
    }

    /// The `.old-` that recovery would choose: the newest whose successor never had the name.
    fn candidate(&self, sc: &Scenario) -> Option<usize> {
        let partner = |q| !sc.on(Partner) || self.at(Tmp(q)).is_some();
        let fits =
            |&x: &usize| matches!(self.dirs[x].at, Old(q, _) if partner(q)) && self.dirs[x].manifest == 2;
        (0..5).filter(fits).max_by_key(|&x| self.dirs[x].age)
    }

    fn view(&self, sc: &Scenario) -> View {
        let found = match self.at(Name) {
            Some(USERS) => return View::Users,
            Some(x) => x,
            None => match self.candidate(sc) {
                Some(x) => x,
                None => return View::Missing,
            },
        };
        if self.dirs[found].manifest == 2 && self.dirs[found].shards {
            View::Found(found)
        } else {
            View::Corrupt(found)
        }
    }
}

/// One step of one process: the states that it can lead to.
struct Step<'a> {
    sc: &'a Scenario,
    s: &'a State,
    p: usize,
    out: &'a mut Vec<(usize, Pc, State)>,
}

impl Step<'_> {
    /// Adds one outcome: the directory and the process after it.
    fn to(&mut self, pc: Pc, change: impl FnOnce(&mut State, &mut Proc)) {
        let mut next = self.s.clone();
        let mut me = next.procs[self.p];
        let from = me.pc;
        me.pc = pc;
        change(&mut next, &mut me);
        if me.pc == Pc::Done {
            let end = if me.end == End::Running { End::Good } else { me.end };
            me = Proc { end, ..DONE };
        }
        next.procs[self.p] = me;
        self.out.push((self.p, from, next));
    }

    fn go(&mut self, pc: Pc) {
        self.to(pc, |_, _| ());
    }

    /// The possible results of a look-up of the name: the truth, or a cached result.
    fn looks(&self, fresh: bool) -> Vec<Option<usize>> {
        let mut all = vec![self.s.at(Name)];
        if self.sc.stale && !fresh {
            let before = (self.s.before != NONE).then_some(self.s.before as usize);
            // A directory that is gone causes ESTALE, and the look-up is repeated.
            if before != all[0] && before.is_none_or(|x| self.s.dirs[x].at != Gone) {
                all.push(before);
            }
        }
        all
    }

    fn workspace(&self) -> At {
        Tmp(self.p as u8)
    }

    fn aside(&self) -> At {
        Old(self.p as u8, self.s.procs[self.p].n)
    }

    fn run(&mut self) {
        match self.s.procs[self.p].pc {
            Pc::Mkdir | Pc::Create | Pc::Fill => self.build(),
            Pc::Look | Pc::Check | Pc::Refuse | Pc::Carry | Pc::Again => self.prepare(),
            Pc::Candidates | Pc::Adopt | Pc::AdoptCarry => self.prepare(),
            Pc::Swap | Pc::Inspect | Pc::Other | Pc::Back | Pc::BackCheck | Pc::BackAgain => self.replace(),
            Pc::Rename | Pc::Undo | Pc::Taken | Pc::TakenClaim | Pc::Sync | Pc::Displaced | Pc::After => {
                self.finish()
            }
            Pc::Fail | Pc::FailClaim | Pc::Unclaim | Pc::First | Pc::Rest => self.remove(),
            Pc::Pick | Pc::Judge | Pc::TmpLook | Pc::TmpRmdir | Pc::TmpClaim => self.sweep(),
            Pc::OldLook | Pc::OldName | Pc::OldClaim => self.sweep_old(),
            Pc::Open | Pc::Manifest | Pc::Shards | Pc::Named => self.load(),
            Pc::Recover | Pc::Dead | Pc::Relist | Pc::PutBack => self.recover(),
            Pc::Act => self.user(),
            Pc::Done => {}
        }
    }

    fn build(&mut self) {
        let (p, mine) = (self.p, self.s.dirs[self.p]);
        let first_in = self.sc.on(ManifestFirstIn);
        match self.s.procs[p].pc {
            Pc::Mkdir => {
                let at = self.workspace();
                self.to(if first_in { Pc::Create } else { Pc::Fill }, |s, _| s.mv(p, at));
            }
            // Another process took the empty directory, so this one begins again.
            Pc::Create if mine.at == Gone => self.go(Pc::Mkdir),
            Pc::Create if first_in => self.to(Pc::Fill, |s, _| s.dirs[p].manifest = 1),
            Pc::Create => self.to(Pc::Look, |s, _| s.write_manifest(p)),
            Pc::Fill if mine.at == Gone => self.go(Pc::Fail),
            Pc::Fill => self.to(if first_in { Pc::Look } else { Pc::Create }, |s, _| {
                s.dirs[p].shards = true;
                if s.dirs[p].manifest == 1 {
                    s.write_manifest(p);
                }
            }),
            _ => unreachable!(),
        }
    }

    fn prepare(&mut self) {
        let (p, me) = (self.p, self.s.procs[self.p]);
        let old = me.old as usize;
        match me.pc {
            Pc::Look => {
                for found in self.looks(false) {
                    match found {
                        Some(x) => self.to(Pc::Check, |_, me| me.old = x as u8),
                        None => self.to(Pc::Candidates, |_, me| me.old = NONE),
                    }
                }
            }
            Pc::Check if self.s.dirs[old].manifest == 2 => self.go(Pc::Carry),
            Pc::Check => self.go(Pc::Refuse),
            Pc::Refuse if self.s.at(Name) == Some(old) => self.go(Pc::Fail),
            Pc::Refuse => self.go(Pc::Look),
            Pc::Carry | Pc::AdoptCarry => {
                let next = match me.pc {
                    Pc::AdoptCarry => Pc::Rename,
                    _ if self.sc.on(LookBeforeSwap) => Pc::Again,
                    _ => Pc::Swap,
                };
                self.to(next, |s, _| s.carry(p, old));
            }
            Pc::Again if self.s.at(Name) == Some(old) => self.go(Pc::Swap),
            Pc::Again => self.go(Pc::Look),
            Pc::Candidates if self.s.at(Name).is_some() && self.sc.on(OneLook) => self.go(Pc::Look),
            Pc::Candidates => match self.s.candidate(self.sc).filter(|_| self.sc.on(Adopt)) {
                Some(x) => self.to(Pc::Adopt, |s, me| me.from = s.dirs[x].at),
                None => self.to(Pc::Rename, |_, me| (me.hold, me.x) = (false, NONE)),
            },
            Pc::Adopt => match self.s.at(me.from) {
                Some(x) => {
                    let aside = self.aside();
                    self.to(Pc::AdoptCarry, |s, me| {
                        s.mv(x, aside);
                        s.dirs[x].adopted = true;
                        me.hold = true;
                        (me.old, me.x) = (x as u8, x as u8);
                    });
                }
                None => self.go(Pc::Look),
            },
            _ => unreachable!(),
        }
    }

    fn replace(&mut self) {
        let (p, me) = (self.p, self.s.procs[self.p]);
        let (exchange, workspace) = (self.sc.exchange, self.workspace());
        let displaced = if exchange { workspace } else { self.aside() };
        let next = if exchange { Pc::Sync } else { Pc::Rename };
        match me.pc {
            Pc::Swap => match self.s.at(Name) {
                // A swap with a missing directory fails; the first of two renames does not.
                _ if exchange && self.s.dirs[p].at != workspace => self.go(Pc::Fail),
                None => self.go(Pc::Look),
                Some(x) if exchange => self.to(Pc::Inspect, |s, _| {
                    s.swap(p, x);
                    s.publish(p);
                }),
                Some(x) => self.to(Pc::Inspect, |s, me| {
                    s.mv(x, displaced);
                    me.hold = true;
                }),
            },
            Pc::Inspect => {
                let found = self.s.at(displaced);
                let right = !self.sc.on(InodeAfterSwap) || found.is_none_or(|x| x == me.old as usize);
                self.to(if right { next } else { Pc::Other }, |_, me| me.x = found.map_or(NONE, |x| x as u8));
            }
            Pc::Other if self.s.dirs[me.x as usize].manifest == 2 => {
                self.to(next, |s, _| s.carry(p, me.x as usize))
            }
            Pc::Other => self.go(Pc::Back),
            Pc::Back => match (self.s.at(displaced), self.s.at(Name)) {
                // Another process has the directory, and this one could not claim it.
                (None, _) => self.to(if exchange { Pc::Sync } else { Pc::Fail }, |_, me| me.x = NONE),
                (Some(x), None) => self.to(if exchange { Pc::Done } else { Pc::Fail }, |s, me| {
                    s.mv(x, Name);
                    me.end = End::Failed;
                }),
                (Some(x), Some(named)) if exchange => self.to(Pc::BackCheck, |s, _| {
                    s.swap(x, named);
                    if named == p {
                        s.dirs[p].rank = 0;
                    }
                }),
                _ => self.go(Pc::Fail),
            },
            Pc::BackCheck if self.s.at(workspace).is_some_and(|x| x != p) && self.sc.on(OwnAfterBack) => {
                self.go(Pc::BackAgain);
            }
            Pc::BackCheck => self.go(Pc::Fail),
            Pc::BackAgain => {
                let (x, named) = (self.s.at(workspace), self.s.at(Name));
                self.to(Pc::Done, |s, me| {
                    me.end = End::Failed;
                    match (x, named) {
                        (Some(x), Some(named)) => s.swap(x, named),
                        (Some(x), None) => s.mv(x, Name),
                        _ => {}
                    }
                });
            }
            _ => unreachable!(),
        }
    }

    fn finish(&mut self) {
        let (p, me) = (self.p, self.s.procs[self.p]);
        let (workspace, aside) = (self.workspace(), self.aside());
        let attempts = self.sc.on(Attempts);
        match me.pc {
            Pc::Rename => match self.s.at(Name) {
                _ if self.s.dirs[p].at != workspace => self.go(Pc::Undo),
                Some(_) => self.go(Pc::Taken),
                None => self.to(Pc::Sync, |s, _| {
                    s.mv(p, Name);
                    s.publish(p);
                }),
            },
            Pc::Undo => {
                let back = self.s.at(aside).filter(|_| me.hold && self.s.at(Name).is_none());
                self.to(Pc::Fail, |s, _| {
                    if let Some(x) = back {
                        s.mv(x, Name);
                    }
                });
            }
            Pc::Taken if !me.hold || self.s.at(aside).is_none() => self.to(Pc::Look, |_, me| {
                me.n += u8::from(me.hold && attempts);
                me.hold = false;
            }),
            Pc::Taken => match self.s.at(Name) {
                None => self.go(Pc::Rename),
                Some(named) if self.s.supersedes(self.sc, named, me.x as usize) => self.go(Pc::TakenClaim),
                Some(_) => self.go(Pc::Fail),
            },
            Pc::TakenClaim => {
                self.claim(aside, Pc::Look, |me| {
                    me.hold = false;
                    me.n += u8::from(attempts);
                });
            }
            Pc::Sync => self.to(Pc::Displaced, |s, _| s.success |= 1 << p),
            Pc::Displaced => {
                self.claim(if self.sc.exchange && !me.hold { workspace } else { aside }, Pc::After, |_| ())
            }
            Pc::After if p == LATE && self.sc.on(SweepAfter) => self.go(Pc::Pick),
            Pc::After => {
                let old = self.s.dirs.iter().map(|dir| dir.at).find(|at| matches!(at, Old(..)));
                match old.filter(|_| self.sc.on(SweepAfter)) {
                    Some(old) => self.to(Pc::OldLook, |_, me| (me.from, me.then) = (old, Pc::Done)),
                    None => self.go(Pc::Done),
                }
            }
            _ => unreachable!(),
        }
    }

    /// Claims the examined directory (`x`), and continues with its removal. A later owner of its name is put back.
    fn claim(&mut self, name: At, then: Pc, change: impl FnOnce(&mut Proc)) {
        let seen = self.s.procs[self.p].x;
        let found = self.s.at(name).filter(|_| seen != NONE || !self.sc.on(CompareClaimed));
        let right = found.is_some_and(|x| x as u8 == seen) || !self.sc.on(CompareClaimed);
        let next = if right { Pc::First } else { Pc::Unclaim };
        let by_rename = self.sc.on(ClaimByRename);
        self.to(if found.is_some() { next } else { then }, |s, me| {
            change(me);
            if let Some(x) = found {
                (me.x, me.from, me.then) = (x as u8, name, then);
                if by_rename {
                    s.mv(x, Del);
                }
            }
        });
    }

    fn remove(&mut self) {
        let (p, me) = (self.p, self.s.procs[self.p]);
        let x = me.x as usize;
        match me.pc {
            Pc::Fail => self.to(Pc::FailClaim, |_, me| (me.x, me.end) = (p as u8, End::Failed)),
            Pc::FailClaim => self.claim(self.workspace(), Pc::Done, |_| ()),
            Pc::Unclaim => self.to(me.then, |s, me| {
                if s.at(me.from).is_none() && s.dirs[x].at == Del {
                    s.mv(x, me.from);
                }
                me.x = NONE;
            }),
            Pc::First => self.to(Pc::Rest, |s, _| s.unlink(x, true)),
            Pc::Rest => self.to(me.then, |s, me| {
                s.unlink(x, false);
                if s.empty(x) && s.dirs[x].at != Gone {
                    s.mv(x, Gone);
                }
                me.x = NONE;
            }),
            _ => unreachable!(),
        }
    }

    /// Whether a directory under one of fastckpt's names belongs to fastckpt.
    fn ours(&self, x: usize) -> bool {
        self.s.dirs[x].manifest > 0 || self.s.empty(x) || !self.sc.on(OnlyOurs)
    }

    fn dead(&self) -> bool {
        self.sc.proof && self.s.procs[owner(self.s.procs[self.p].from)].pc == Pc::Done
    }

    fn sweep(&mut self) {
        let (p, me) = (self.p, self.s.procs[self.p]);
        let after = Pc::Pick;
        match me.pc {
            Pc::Pick if p == LATE => self.pick_late(),
            Pc::Pick => {
                self.go(Pc::Done);
                if me.n > 0 {
                    for x in 0..self.s.dirs.len() {
                        self.pick(x);
                    }
                }
            }
            Pc::Judge if self.dead() => self.go(Pc::TmpLook),
            Pc::Judge => {
                self.go(after);
                if self.s.wrong > 0 {
                    self.to(Pc::TmpLook, |s, _| s.wrong -= 1);
                }
            }
            Pc::TmpLook => {
                let old = if self.sc.on(JudgeThenList) { self.s.has_old(owner(me.from)) } else { me.hold };
                match self.s.at(me.from) {
                    _ if old && self.sc.on(SpareTmpWithOld) => self.go(after),
                    Some(x) if self.s.empty(x) => self.go(Pc::TmpRmdir),
                    Some(x) if self.ours(x) => self.to(Pc::TmpClaim, |_, me| me.x = x as u8),
                    _ => self.go(after),
                }
            }
            Pc::TmpRmdir => {
                let x = self.s.at(me.from).filter(|&x| self.s.empty(x));
                self.to(after, |s, _| {
                    if let Some(x) = x {
                        s.mv(x, Gone);
                    }
                });
            }
            Pc::TmpClaim => self.claim(me.from, after, |_| ()),
            _ => unreachable!(),
        }
    }

    fn pick(&mut self, x: usize) {
        let from = self.s.dirs[x].at;
        let (next, has_old) = match from {
            Tmp(_) if self.s.empty(x) => (Pc::TmpRmdir, false),
            Tmp(q) => (Pc::Judge, self.s.has_old(q as usize)),
            Old(..) => (Pc::OldLook, false),
            Del => (Pc::First, false),
            _ => return,
        };
        self.to(next, |_, me| {
            (me.from, me.then, me.hold, me.n) = (from, Pc::Pick, has_old, me.n.saturating_sub(1));
            me.x = x as u8;
        });
    }

    /// The last save sweeps everything, before and after it publishes.
    fn pick_late(&mut self) {
        if (0..LATE).chain(SWEEPER..6).any(|p| self.s.procs[p].pc != Pc::Done) {
            return;
        }
        let named = self.s.at(Name);
        let next = (0..5).find(|&x| match self.s.dirs[x].at {
            Del => true,
            Tmp(q) => self.ours(x) && self.sc.proof && !self.s.has_old(q as usize),
            Old(..) => self.ours(x) && named.is_some_and(|named| self.s.supersedes(self.sc, named, x)),
            _ => false,
        });
        match next {
            Some(x) => self.pick(x),
            None if self.s.dirs[LATE].rank > 0 => self.go(Pc::Done),
            None => self.go(Pc::Mkdir),
        }
    }

    fn sweep_old(&mut self) {
        let me = self.s.procs[self.p];
        match me.pc {
            Pc::OldLook => match self.s.at(me.from) {
                Some(x) if self.ours(x) => self.to(Pc::OldName, |_, me| me.x = x as u8),
                _ => self.go(me.then),
            },
            Pc::OldName => {
                for named in self.looks(self.sc.on(FreshName)) {
                    let other = named.is_some_and(|named| {
                        let same = named == me.x as usize && self.sc.on(OldInode);
                        !same && self.s.supersedes(self.sc, named, me.x as usize)
                    });
                    self.go(if other { Pc::OldClaim } else { me.then });
                }
            }
            Pc::OldClaim => self.claim(me.from, me.then, |_| ()),
            _ => unreachable!(),
        }
    }

    fn load(&mut self) {
        let me = self.s.procs[self.p];
        let x = me.old as usize;
        match me.pc {
            Pc::Open => {
                for found in self.looks(false) {
                    match found {
                        Some(x) => self.to(Pc::Manifest, |_, me| me.old = x as u8),
                        None => self.go(Pc::Recover),
                    }
                }
            }
            Pc::Manifest if self.s.dirs[x].manifest == 2 => self.go(Pc::Shards),
            Pc::Manifest => self.go(Pc::Named),
            Pc::Shards if self.s.dirs[x].shards => self.go(Pc::Done),
            Pc::Shards => self.go(Pc::Named),
            Pc::Named => {
                for named in self.looks(self.sc.on(FreshReader)) {
                    if named == Some(x) {
                        let fine = x == USERS || self.s.spoilt >> x & 1 == 1;
                        self.to(Pc::Done, |_, me| me.end = if fine { End::Good } else { End::Failed });
                    } else {
                        self.to(Pc::Open, |_, me| me.old = NONE);
                    }
                }
            }
            _ => unreachable!(),
        }
    }

    fn recover(&mut self) {
        let me = self.s.procs[self.p];
        let candidate = self.s.candidate(self.sc);
        match me.pc {
            Pc::Recover | Pc::Relist => match candidate {
                _ if self.s.at(Name).is_some() && self.sc.on(OneLook) => self.go(Pc::Open),
                Some(x) => {
                    let next = if me.pc == Pc::Relist { Pc::PutBack } else { Pc::Dead };
                    self.to(next, |s, me| (me.x, me.from) = (x as u8, s.dirs[x].at));
                }
                None => {
                    let end =
                        if self.s.removed > 0 || self.s.put || !self.sc.old || self.s.wrong < self.sc.wrong {
                            End::Good
                        } else {
                            End::Failed
                        };
                    self.to(Pc::Done, |_, me| me.end = end);
                }
            },
            Pc::Dead if self.dead() => self.go(Pc::Relist),
            Pc::Dead => {
                if self.s.at(Name).is_some() {
                    self.go(Pc::Open);
                }
                // The wait is over.
                if self.sc.on(ProofBeforePutBack) {
                    self.to(Pc::Manifest, |_, me| me.old = me.x);
                } else {
                    self.go(Pc::PutBack);
                }
            }
            Pc::PutBack => {
                let x = self.s.at(me.from).filter(|_| self.s.at(Name).is_none());
                self.to(Pc::Open, |s, me| {
                    if let Some(x) = x {
                        s.mv(x, Name);
                    }
                    (me.x, me.from) = (NONE, Gone);
                });
            }
            _ => unreachable!(),
        }
    }

    fn user(&mut self) {
        let me = self.s.procs[self.p];
        let acts = self.sc.user;
        let next = if me.n as usize + 1 == acts.len() { Pc::Done } else { Pc::Act };
        let named = self.s.at(Name);
        self.to(next, |s, me| {
            me.n += 1;
            let published = s.published();
            match (acts[me.n as usize - 1], named) {
                (Act::MoveAway, Some(x)) => {
                    s.mv(x, Away);
                    // The removal of the user's directory concerns no checkpoint.
                    s.removed |= if x == USERS { 0 } else { published };
                }
                (Act::RmFiles, Some(x)) if x != USERS => {
                    s.removed |= published;
                    s.spoilt |= 1 << x;
                    s.unlink(x, false);
                    me.x = x as u8;
                }
                (Act::RmManifest, _) if me.x != NONE => s.unlink(me.x as usize, true),
                (Act::RmDir, Some(x)) if me.x == x as u8 => s.mv(x, Gone),
                (Act::Put, None) => {
                    s.mv(USERS, Name);
                    s.dirs[USERS].foreign = true;
                    s.put = true;
                }
                _ => {}
            }
        });
    }
}

impl State {
    /// The checkpoints that must not come back if the user removes the name now: all that had it, except an old one
    /// that a live process has between its two renames or is about to take from there.
    fn published(&self) -> u8 {
        let takes = |proc: &Proc, at| matches!(proc.pc, Pc::Adopt | Pc::PutBack) && proc.from == at;
        let held = |x: usize| match self.dirs[x].at {
            Old(q, _) => {
                self.dirs[x].adopted
                    || self.procs[q as usize].pc != Pc::Done
                    || self.procs.iter().any(|proc| takes(proc, self.dirs[x].at))
            }
            _ => false,
        };
        (0..5).filter(|&x| self.dirs[x].rank > 0 && !held(x)).fold(0, |all, x| all | 1 << x)
    }

    fn write_manifest(&mut self, p: usize) {
        self.dirs[p].age = self.dirs.iter().map(|dir| dir.age).max().unwrap() + 1;
        self.dirs[p].manifest = 2;
    }

    /// Creates hard links to foreign files. Creates none in a removed directory.
    fn carry(&mut self, p: usize, old: usize) {
        if self.dirs[p].at != Gone && self.dirs[old].foreign {
            self.dirs[p].foreign = true;
        }
    }

    fn unlink(&mut self, x: usize, manifest: bool) {
        if manifest {
            self.dirs[x].manifest = 0;
        } else {
            self.dirs[x].shards = false;
            self.dirs[x].foreign = false;
        }
    }

    /// The invariants that hold at every moment.
    fn check(&self, sc: &Scenario) -> Result<(), String> {
        let view = self.view(sc);
        let user = self.removed > 0 || self.put;
        let newest = (0..5).max_by_key(|&x| self.dirs[x].rank).filter(|&x| self.dirs[x].rank > 0);
        let wrong = self.wrong < sc.wrong;
        let lost = |x: usize| format!("{view:?} where {x} is the newest");
        match (view, newest) {
            (View::Corrupt(x), _) if self.spoilt >> x & 1 == 0 => return Err(format!("corrupt: {x}")),
            (View::Missing, Some(x)) if self.removed >> x & 1 == 0 && !self.put && !wrong => {
                return Err(lost(x));
            }
            (View::Found(x), _) if self.removed >> x & 1 == 1 => return Err(format!("{x} came back")),
            (View::Users | View::Missing, Some(x)) if self.removed >> x & 1 == 0 => {
                let dir = &self.dirs[x];
                if dir.at == Gone || dir.manifest != 2 || !dir.shards {
                    return Err(lost(x));
                }
            }
            _ => {}
        }
        if self.put && (!self.dirs[USERS].foreign || self.dirs[USERS].at == Gone) {
            return Err("the user's directory was emptied".into());
        }
        if let View::Found(found) = view {
            let rank = |x: usize| self.dirs[x].rank;
            for x in (0..3).filter(|x| self.success >> x & 1 == 1 && self.removed >> x & 1 == 0) {
                if rank(x) > rank(found) {
                    return Err(format!("the success of {} is lost to {found}", NAMES[x]));
                }
            }
        }
        if let Some(p) = (0..3).find(|&p| self.procs[p].end == End::Failed && !wrong && !user) {
            return Err(format!("{} failed", NAMES[p]));
        }
        if self.procs[LOADER].end == End::Failed {
            return Err("the loader says corrupt or missing".into());
        }
        Ok(())
    }

    /// The invariants that hold after all processes end.
    fn check_end(&self, sc: &Scenario) -> Result<(), String> {
        let quiet = self.crashes == sc.crashes && self.wrong == sc.wrong && !self.put && self.spoilt == 0;
        if quiet || sc.late && self.procs[LATE].end == End::Good {
            let litter = |x: &usize| *x != USERS && matches!(self.dirs[*x].at, Tmp(_) | Old(..) | Del);
            if let Some(x) = (0..5).find(litter) {
                return Err(format!("litter: {x} at {:?}", self.dirs[x].at));
            }
        }
        // A wrong judgement can remove the partner of an `.old-`. In that case, no save carries over files from it.
        let carried = sc.old && sc.user.is_empty() && (sc.exchange || self.wrong == sc.wrong);
        if let Some(x) = self.at(Name).filter(|_| carried)
            && !self.dirs[x].foreign
        {
            return Err(format!("the file beside the shards is not in {x}"));
        }
        Ok(())
    }
}

/// Each step of the hash is a bijection, so two states collide by chance only: one run in a million would miss a state.
#[derive(Default)]
struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }
    fn write_u8(&mut self, n: u8) {
        self.write_u64(n.into());
    }
    fn write_isize(&mut self, n: isize) {
        self.write_u64(n.cast_unsigned() as u64);
    }
    fn write_u64(&mut self, n: u64) {
        let mixed = (self.0 ^ n).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        self.0 = mixed ^ (mixed >> 32);
    }
}

/// Visits every state, breadth first, so that a counterexample is the shortest one. Returns the number of states.
fn explore(sc: &Scenario) -> Result<usize, String> {
    let key = |state: &State| {
        let mut hasher = Mix(1);
        state.hash(&mut hasher);
        hasher.finish()
    };
    let first = sc.start();
    let mut known: HashMap<u64, u32, BuildHasherDefault<Mix>> = HashMap::default();
    known.insert(key(&first), 0);
    let start = first.procs;
    // For a visited state, only the step that led there is kept.
    let mut all: Vec<Origin> = vec![(0, USER as u8, Pc::Done)];
    let mut queue = VecDeque::from([first]);
    let (mut edges, mut ends) = (vec![], vec![]);
    let mut out = vec![];
    let mut at = 0;
    while let Some(state) = queue.pop_front() {
        state.check(sc).map_err(|why| trace(&all, at, &format!("{why}: {:?}", state.dirs)))?;
        out.clear();
        for (p, begin) in start.iter().enumerate() {
            let before = out.len();
            Step { sc, s: &state, p, out: &mut out }.run();
            if out.len() > before && state.crashes > 0 && p != USER && p != LATE && state.procs[p] != *begin {
                let mut next = state.clone();
                next.crashes -= 1;
                next.procs[p] = Proc { end: End::Killed, ..DONE };
                out.push((p, Pc::Done, next));
            }
        }
        if state.procs.iter().all(|proc| proc.pc == Pc::Done) {
            ends.push(at as u32);
            state.check_end(sc).map_err(|why| trace(&all, at, &format!("{why}: {:?}", state.dirs)))?;
        }
        for (p, pc, next) in out.drain(..) {
            let id = *known.entry(key(&next)).or_insert_with(|| {
                all.push((at as u32, p as u8, pc));
                queue.push_back(next);
                all.len() as u32 - 1
            });
            edges.push((id, at as u32));
        }
        at += 1;
    }
    // Checks that every state can reach an end.
    edges.sort_unstable();
    let mut live = vec![false; all.len()];
    for &end in &ends {
        live[end as usize] = true;
    }
    while let Some(end) = ends.pop() {
        let begin = edges.partition_point(|&(to, _)| to < end);
        for &(_, from) in edges[begin..].iter().take_while(|&&(to, _)| to == end) {
            if !live[from as usize] {
                live[from as usize] = true;
                ends.push(from);
            }
        }
    }
    match live.iter().position(|live| !live) {
        Some(at) => Err(trace(&all, at, "no end can be reached")),
        None => Ok(all.len()),
    }
}

/// The state before, the process that made the step, and the step; `Done` means that the process was killed.
type Origin = (u32, u8, Pc);

fn trace(all: &[Origin], mut at: usize, why: &str) -> String {
    let mut steps = vec![why.to_owned()];
    while at > 0 {
        let (from, p, pc) = all[at];
        let what = if pc == Pc::Done { "KILLED".into() } else { format!("{pc:?}") };
        steps.push(format!("{}: {what}", NAMES[p as usize]));
        at = from as usize;
    }
    steps.reverse();
    steps.join("\n  ")
}

/// Checks that the protocol holds in each of the scenarios.
fn holds(scenarios: impl IntoIterator<Item = Scenario>) {
    for sc in scenarios {
        let begin = std::time::Instant::now();
        match explore(&sc) {
            Ok(states) => println!("{states} states in {:?}: {sc:?}", begin.elapsed()),
            Err(trace) => panic!("{sc:?}\n  {trace}"),
        }
    }
}

const REMOVE: &[&[Act]] = &[&[Act::MoveAway], &[Act::RmFiles, Act::RmManifest, Act::RmDir]];
const PUT: &[&[Act]] = &[&[Act::Put], &[Act::MoveAway, Act::Put]];

fn both() -> impl Iterator<Item = Scenario> {
    [true, false].into_iter().map(Scenario::new)
}

/// The longest test: six million states, half a minute on a busy core, 500 MB.
#[test]
fn two_savers_a_sweeper_a_loader_and_a_kill() {
    let all = |exchange| Scenario { sweeper: 1, loader: true, late: true, ..Scenario::new(exchange) };
    holds([Scenario { crashes: 2, stale: true, ..all(true) }, Scenario { crashes: 1, ..all(false) }]);
}

#[test]
fn two_savers_and_two_kills() {
    let more = |sc: Scenario| {
        [false, true].map(|old| Scenario { old, stale: true, crashes: 2, late: true, ..sc.clone() })
    };
    holds(both().chain(both().flat_map(more)));
}

#[test]
fn a_loader_finds_a_checkpoint_at_every_moment() {
    let base = || both().map(|sc| Scenario { loader: true, stale: true, ..sc });
    holds(base().map(|sc| Scenario { crashes: 1, late: true, ..sc }));
    holds(base().map(|sc| Scenario { crashes: 1, proof: false, ..sc }));
}

#[test]
fn a_sweep_takes_only_what_is_dead() {
    holds(both().map(|sc| Scenario { sweeper: 1, crashes: 1, late: true, ..sc }));
    holds(both().map(|sc| Scenario { sweeper: 2, crashes: 2, savers: 1, late: true, ..sc }));
    holds(both().map(|sc| Scenario { sweeper: 1, loader: true, crashes: 2, savers: 1, ..sc }));
}

#[test]
fn a_wrong_judgement_fails_a_save_at_most() {
    holds(both().map(|sc| Scenario { sweeper: 1, wrong: 1, ..sc }));
    holds(both().map(|sc| Scenario { sweeper: 1, wrong: 1, crashes: 1, savers: 1, loader: true, ..sc }));
    let put = |sc: Scenario| PUT.iter().map(move |user| Scenario { user, ..sc.clone() });
    holds(both().map(|sc| Scenario { sweeper: 1, wrong: 1, savers: 1, crashes: 1, ..sc }).flat_map(put));
}

#[test]
fn what_the_user_removes_stays_away() {
    let remove = |sc: Scenario| REMOVE.iter().map(move |user| Scenario { user, ..sc.clone() });
    holds(both().map(|sc| Scenario { crashes: 1, late: true, ..sc }).flat_map(remove));
    holds(both().map(|sc| Scenario { loader: true, stale: true, user: REMOVE[0], ..sc }));
    holds(
        both().map(|sc| Scenario { loader: true, stale: true, crashes: 1, savers: 1, ..sc }).flat_map(remove),
    );
}

#[test]
fn a_directory_of_the_users_stays_whole() {
    let put = |sc: Scenario| PUT.iter().map(move |user| Scenario { user, ..sc.clone() });
    holds(both().map(|sc| Scenario { sweeper: 1, ..sc }).flat_map(put));
    holds(both().map(|sc| Scenario { crashes: 2, savers: 1, sweeper: 1, late: true, ..sc }).flat_map(put));
    holds(both().map(|sc| Scenario { loader: true, user: PUT[0], ..sc }));
    holds(both().map(|sc| Scenario { loader: true, crashes: 1, savers: 1, ..sc }).flat_map(put));
}

/// The model can fail, and each rule is needed: without the rule there is a counterexample.
#[test]
fn every_rule_is_needed() {
    let (x, plain) = (Scenario::new(true), Scenario::new(false));
    let one = |sc: &Scenario| Scenario { savers: 1, ..sc.clone() };
    let dies = |sc: &Scenario| Scenario { crashes: 1, late: true, ..sc.clone() };
    let cases: &[(&[Rule], Scenario)] = &[
        (&[ClaimByRename], Scenario { sweeper: 1, wrong: 1, ..one(&x) }),
        (&[Partner], Scenario { user: REMOVE[0], crashes: 1, ..one(&plain) }),
        (&[InodeAfterSwap], Scenario { user: PUT[1], ..one(&x) }),
        (&[InodeAfterSwap], Scenario { user: PUT[1], ..one(&plain) }),
        (&[SpareTmpWithOld], Scenario { sweeper: 1, crashes: 1, ..one(&plain) }),
        (&[JudgeThenList], Scenario { sweeper: 1, crashes: 1, ..one(&plain) }),
        (&[OnlyOurs], Scenario { user: PUT[1], ..dies(&one(&x)) }),
        (&[Attempts], Scenario { sweeper: 1, crashes: 1, ..plain.clone() }),
        (&[OldInode, FreshName], Scenario { sweeper: 1, stale: true, crashes: 1, ..one(&plain) }),
        (&[Adopt], dies(&plain)),
        (&[ProofBeforePutBack], Scenario { loader: true, crashes: 1, ..plain.clone() }),
        (&[LookBeforeSwap], dies(&x)),
        (&[SweepAfter], Scenario { user: REMOVE[0], ..dies(&one(&plain)) }),
        (&[CheckpointHasName], Scenario { user: PUT[0], ..one(&plain) }),
        (&[CompareClaimed], Scenario { user: PUT[1], sweeper: 1, wrong: 1, ..one(&x) }),
        (&[ManifestFirstIn], dies(&one(&x))),
        (&[FreshReader], Scenario { loader: true, stale: true, ..one(&x) }),
        (&[OneLook], Scenario { loader: true, ..plain.clone() }),
        (&[OwnAfterBack], Scenario { user: PUT[1], sweeper: 1, ..x.clone() }),
    ];
    for (off, sc) in cases {
        explore(sc).unwrap_or_else(|trace| panic!("all rules on, {sc:?}\n  {trace}"));
        match explore(&Scenario { off: off.to_vec(), ..sc.clone() }) {
            Err(trace) => println!("without {off:?}:\n  {trace}"),
            Ok(states) => panic!("nothing breaks without {off:?}: {states} states, {sc:?}"),
        }
    }
}
