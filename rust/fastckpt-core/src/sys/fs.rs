//! Calls of rustix for file systems. Calls for which storage may take long are recorded while they last (see
//! [`super::calls`]).

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;

use rustix::io::Result;
use rustix::path::Arg;

use super::calls;

pub use rustix::fs::*;

/// Defines calls on a file, or on a name in a directory. The string of each call names it in errors.
macro_rules! noted {
    ($($verb:literal: $call:ident($($more:ident: $kind:ty),*) -> $out:ty;)*) => {$(
        /// The rustix call of the same name.
        pub fn $call(fd: impl AsFd, $($more: $kind),*) -> Result<$out> {
            let _call = calls::on($verb, &fd);
            rustix::fs::$call(fd, $($more),*)
        }
    )*};
    ($($verb:literal: $call:ident(name $(, $more:ident: $kind:ty)*) -> $out:ty;)*) => {$(
        /// The rustix call of the same name.
        pub fn $call(fd: impl AsFd, name: impl Arg $(, $more: $kind)*) -> Result<$out> {
            let _call = calls::at($verb, Some(fd.as_fd()), || text(&name));
            rustix::fs::$call(fd, name $(, $more)*)
        }
    )*};
}

noted! {
    "look at": fstat() -> Stat;
    "look at": fstatfs() -> StatFs;
    "allocate": fallocate(mode: FallocateFlags, offset: u64, len: u64) -> ();
    "truncate": ftruncate(len: u64) -> ();
    "sync": fsync() -> ();
    "sync": fdatasync() -> ();
    "change the mode of": fchmod(mode: Mode) -> ();
    "change the group of": fchown(owner: Option<Uid>, group: Option<Gid>) -> ();
    "set the times of": futimens(times: &Timestamps) -> ();
}

noted! {
    "look at": statat(name, flags: AtFlags) -> Stat;
    "look at": statx(name, flags: AtFlags, mask: StatxFlags) -> Statx;
    "look at": accessat(name, access: Access, flags: AtFlags) -> ();
    "open": openat(name, flags: OFlags, mode: Mode) -> OwnedFd;
    "open": openat2(name, flags: OFlags, mode: Mode, resolve: ResolveFlags) -> OwnedFd;
    "make": mkdirat(name, mode: Mode) -> ();
    "remove": unlinkat(name, flags: AtFlags) -> ();
}

/// The rustix call of the same name.
pub fn open(path: impl Arg, flags: OFlags, mode: Mode) -> Result<OwnedFd> {
    let _call = calls::at("open", None, || text(&path));
    rustix::fs::open(path, flags, mode)
}

/// The rustix call of the same name.
pub fn renameat(from: impl AsFd, old: impl Arg, to: impl AsFd, new: impl Arg) -> Result<()> {
    let _call = calls::at("rename", Some(from.as_fd()), || text(&old));
    rustix::fs::renameat(from, old, to, new)
}

/// The rustix call of the same name.
pub fn renameat_with(
    from: impl AsFd,
    old: impl Arg,
    to: impl AsFd,
    new: impl Arg,
    flags: RenameFlags,
) -> Result<()> {
    let _call = calls::at("rename", Some(from.as_fd()), || text(&old));
    rustix::fs::renameat_with(from, old, to, new, flags)
}

/// The rustix call of the same name.
pub fn linkat(from: impl AsFd, old: impl Arg, to: impl AsFd, new: impl Arg, flags: AtFlags) -> Result<()> {
    let _call = calls::at("link", Some(from.as_fd()), || text(&old));
    rustix::fs::linkat(from, old, to, new, flags)
}

/// The rustix call of the same name.
pub fn fsetxattr(fd: impl AsFd, name: impl Arg, value: &[u8], flags: XattrFlags) -> Result<()> {
    let _call = calls::on("set an attribute of", &fd);
    rustix::fs::fsetxattr(fd, name, value, flags)
}

fn text(name: &impl Arg) -> PathBuf {
    PathBuf::from(&*name.to_string_lossy())
}
