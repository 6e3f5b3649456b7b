//! Which machines see a lock on a file (`docs/format.md`, 6.2).

use std::os::fd::BorrowedFd;

use crate::sys::fs::{self, major, minor};
use crate::sys::mounts::{Mount, mounts};

/// Which processes see a lock on a file of a file system.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// Every process on this machine, which is the only one that has the file system mounted.
    Machine,
    /// Every machine that has the file system mounted.
    Everywhere,
    /// Unknown: perhaps only processes that use the same mount.
    #[default]
    Unknown,
}

impl Reach {
    /// The name as one word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Machine => "machine",
            Self::Everywhere => "everywhere",
            Self::Unknown => "unknown",
        }
    }
}

/// Magic numbers (`statfs(2)`) of file systems that only one kernel mounts: ext2 to ext4, XFS, btrfs, tmpfs, ramfs,
/// overlayfs, f2fs, ZFS, bcachefs, JFS, NILFS.
const LOCAL: [u64; 11] = [
    0xEF53,
    0x5846_5342,
    0x9123_683E,
    0x0102_1994,
    0x8584_58F6,
    0x794C_7630,
    0xF2F5_2010,
    0x2FC1_2FC1,
    0xCA45_1A4E,
    0x3153_464A,
    0x3434,
];
/// `CephFS`: its locks span machines with any mount options.
const CEPH: u64 = 0x00C3_6400;
const NFS: u64 = 0x6969;
const LUSTRE: u64 = 0x0BD0_0BD0;

/// File systems that make names durable in the order in which they were created (ext2 to ext4, XFS), or never (tmpfs,
/// ramfs). On btrfs and f2fs, a sync of a file makes that file and its name durable, but no earlier names.
const ORDERED: [u64; 4] = [0xEF53, 0x5846_5342, 0x0102_1994, 0x8584_58F6];

fn magic(directory: BorrowedFd<'_>) -> Option<u64> {
    u64::try_from(fs::fstatfs(directory).ok()?.f_type).ok()
}

/// Whether `directory` is on NFS.
pub(crate) fn is_nfs(directory: BorrowedFd<'_>) -> bool {
    magic(directory) == Some(NFS)
}

/// Whether a durable name in `directory` proves that all earlier names there are durable, too.
pub(super) fn orders_names(directory: BorrowedFd<'_>) -> bool {
    magic(directory).is_some_and(|magic| ORDERED.contains(&magic))
}

/// Which processes see a lock on a file in `directory`.
pub(crate) fn reach(directory: BorrowedFd<'_>) -> Reach {
    let Some(magic) = magic(directory) else { return Reach::Unknown };
    let options = || {
        let device = fs::fstat(directory).ok()?.st_dev;
        options_of(&mounts(), major(device), minor(device)).map(str::to_owned)
    };
    of(magic, options)
}

fn of(magic: u64, options: impl Fn() -> Option<String>) -> Reach {
    let has = |wanted: &str| options().is_some_and(|all| all.split(',').any(|option| option == wanted));
    match magic {
        magic if LOCAL.contains(&magic) => Reach::Machine,
        CEPH => Reach::Everywhere,
        NFS if has("local_lock=none") => Reach::Everywhere,
        LUSTRE if has("flock") => Reach::Everywhere,
        _ => Reach::Unknown,
    }
}

/// The file system's own options at the place where that device is mounted.
fn options_of(mounts: &[Mount], major: u32, minor: u32) -> Option<&str> {
    let device = format!("{major}:{minor}");
    Some(&mounts.iter().find(|mount| mount.device == device)?.options)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::mounts::parse;

    const MOUNTS: &str = "\
36 35 98:0 / /mnt/a\\040b rw,noatime shared:1 - nfs4 host:/ rw,vers=4.2,local_lock=none,addr=10.0.0.1
37 35 98:1 / /mnt/c rw - nfs host:/c rw,vers=3,nolock,local_lock=all
38 35 98:2 / /scratch rw - lustre mgs@tcp:/fs rw,flock,lazystatfs
39 35 98:3 / /work rw - lustre mgs@tcp:/fs rw,localflock
";

    #[test]
    fn the_mount_tells_who_sees_a_lock() {
        let mounts = parse(MOUNTS.as_bytes());
        let of = |magic, minor| of(magic, || options_of(&mounts, 98, minor).map(str::to_owned));
        assert_eq!(of(NFS, 0), Reach::Everywhere);
        assert_eq!(of(NFS, 1), Reach::Unknown);
        assert_eq!(of(NFS, 9), Reach::Unknown, "no such mount");
        assert_eq!(of(LUSTRE, 2), Reach::Everywhere);
        assert_eq!(of(LUSTRE, 3), Reach::Unknown);
        assert_eq!(of(0x6573_5546, 0), Reach::Unknown, "FUSE");
        assert_eq!(of(0xEF53, 9), Reach::Machine);
        assert_eq!(of(CEPH, 9), Reach::Everywhere);
    }
}
