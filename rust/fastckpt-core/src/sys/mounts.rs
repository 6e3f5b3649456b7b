//! The mounts, from the kernel's list (`proc_pid_mountinfo(5)`): no file system is accessed.

use std::ffi::OsString;
use std::fs::read_link;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Component, Path, PathBuf};

/// A line of `/proc/self/mountinfo`.
#[derive(Debug)]
pub struct Mount {
    /// Major and minor number, such as `98:0`.
    pub device: String,
    /// The mount point.
    pub point: PathBuf,
    /// The type of the file system, such as `nfs4`.
    pub kind: String,
    /// The file system's own options.
    pub options: String,
}

/// The mounts in the namespace of this process; empty if they cannot be read.
#[must_use]
pub fn mounts() -> Vec<Mount> {
    std::fs::read("/proc/self/mountinfo").map_or_else(|_| Vec::new(), |text| parse(&text))
}

/// Parses a text in the format of `/proc/self/mountinfo`.
#[must_use]
pub fn parse(text: &[u8]) -> Vec<Mount> {
    let line = |line: &[u8]| {
        let fields: Vec<&[u8]> = line.split(|&byte| byte == b' ').collect();
        // Optional fields come before the dash.
        let dash = 6 + fields.get(6..)?.iter().position(|field| *field == b"-")?;
        let text = |number: usize| Some(String::from_utf8_lossy(fields.get(number)?).into_owned());
        Some(Mount {
            device: text(2)?,
            point: OsString::from_vec(unescape(fields.get(4)?)).into(),
            kind: text(dash + 1)?,
            options: text(dash + 3)?,
        })
    };
    text.split(|&byte| byte == b'\n').filter_map(line).collect()
}

/// Replaces escapes such as `\040` with the bytes that they represent.
fn unescape(mut field: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    while let Some((&byte, rest)) = field.split_first() {
        let digits = rest.get(..3).and_then(|digits| std::str::from_utf8(digits).ok());
        let octal = digits.and_then(|digits| u8::from_str_radix(digits, 8).ok()).filter(|_| byte == b'\\');
        plain.push(octal.unwrap_or(byte));
        field = if octal.is_some() { &rest[3..] } else { rest };
    }
    plain
}

/// File systems that never wait for another machine or another process.
const LOCAL: [&str; 17] = [
    "bcachefs", "btrfs", "devtmpfs", "erofs", "ext2", "ext3", "ext4", "f2fs", "jfs", "nilfs2", "overlay",
    "ramfs", "rootfs", "squashfs", "tmpfs", "xfs", "zfs",
];
/// How many symbolic links a path may lead through, as in the kernel.
const LINKS: usize = 40;

/// Resolves all symbolic links in `path` except in its last component, if all of it is on local file systems. Does not
/// access other file systems, because a mount that does not respond would block the caller.
///
/// # Errors
/// The reason why a part of the path is not on a local file system.
pub fn local(path: &Path, mounts: &[Mount]) -> Result<PathBuf, String> {
    let path = std::path::absolute(path).map_err(|error| error.to_string())?;
    let mut parts: Vec<OsString> = names(&path);
    let mut found = PathBuf::from("/");
    let mut links = 0;
    while let Some(part) = parts.pop() {
        if part == ".." {
            found.pop();
            continue;
        }
        found.push(part);
        // If several mounts have the same mount point, the last one covers the others.
        let above = mounts.iter().filter(|mount| found.starts_with(&mount.point));
        let mount = above.max_by_key(|mount| mount.point.components().count());
        let kind = mount.map_or("not in /proc/self/mountinfo", |mount| mount.kind.as_str());
        if !LOCAL.contains(&kind) {
            return Err(format!(
                "`{}` is on a file system that may block on a server ({kind})",
                found.display()
            ));
        }
        if parts.is_empty() {
            break;
        }
        // A component that is not a link, or is missing, is not followed.
        let Ok(target) = read_link(&found) else { continue };
        links += 1;
        if links > LINKS {
            return Err(format!("`{}` leads through too many symbolic links", path.display()));
        }
        found.pop();
        if target.is_absolute() {
            found = PathBuf::from("/");
        }
        parts.extend(names(&target));
    }
    Ok(found)
}

/// The names in a path, the last one first.
fn names(path: &Path) -> Vec<OsString> {
    let name = |part: Component<'_>| match part {
        Component::Normal(name) => Some(name.to_owned()),
        Component::ParentDir => Some("..".into()),
        _ => None,
    };
    path.components().rev().filter_map(name).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const MOUNTS: &str = "\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
23 22 0:5 / /dev rw - devtmpfs udev rw
24 23 0:6 / /dev/shm rw shared:2 master:1 - tmpfs tmpfs rw
25 22 0:40 / /home rw - nfs4 host:/ rw,vers=4.2,local_lock=none
26 25 0:41 / /home/here rw - tmpfs tmpfs rw
27 22 0:42 / /mnt/a\\040b rw - fuse.sshfs host: rw
28 22 0:43 / /scratch rw - tmpfs tmpfs rw
29 22 0:44 / /scratch rw - lustre mgs@tcp:/fs rw,flock
a damaged line
";

    #[test]
    fn a_path_is_local_if_all_of_it_is() {
        let mounts = parse(MOUNTS.as_bytes());
        assert_eq!(mounts.len(), 8);
        assert_eq!(
            (mounts[3].device.as_str(), mounts[3].options.as_str()),
            ("0:40", "rw,vers=4.2,local_lock=none")
        );
        let local = |path: &str| local(Path::new(path), &mounts);
        for path in ["/dev/shm/fastckpt-7", "/nowhere/at/all", "/nowhere/../dev/shm/x", "/homes", "/mnt/a"] {
            assert_eq!(
                local(path).as_deref(),
                Ok(std::path::absolute(path).unwrap().as_path())
                    .map(|path| { if path.ends_with("dev/shm/x") { Path::new("/dev/shm/x") } else { path } })
            );
        }
        for (path, kind) in [
            ("/home", "nfs4"),
            ("/home/user/x", "nfs4"),
            ("/home/here/x", "nfs4"),
            ("/dev/../home/x", "nfs4"),
            ("/mnt/a b/x", "fuse.sshfs"),
            ("/scratch/x", "lustre"),
        ] {
            assert!(local(path).is_err_and(|why| why.contains(kind)), "{path}");
        }
        assert!(super::local(Path::new("/dev/shm"), &[]).is_err_and(|why| why.contains("mountinfo")));
    }

    #[test]
    fn links_are_followed_as_far_as_that_asks_nobody() {
        let directory = tempfile::tempdir().unwrap();
        let base = directory.path().canonicalize().unwrap();
        let link = |name: &str, target: &str| symlink(target, base.join(name)).unwrap();
        std::fs::create_dir(base.join("real")).unwrap();
        std::fs::create_dir(base.join("far")).unwrap();
        link("near", "real/../real");
        link("away", "far/x");
        link("absolute", "/dev/shm");
        link("round", "round");
        let far = base.join("far");
        let lines = format!("1 1 8:1 / / rw - ext4 a rw\n2 1 0:1 / {} rw - nfs host:/ rw\n", far.display());
        let mounts = parse(lines.as_bytes());
        let local = |path: &str| local(&base.join(path), &mounts);
        assert_eq!(local("near/x"), Ok(base.join("real/x")));
        assert_eq!(local("absolute/x"), Ok(PathBuf::from("/dev/shm/x")));
        assert_eq!(local("away"), Ok(base.join("away")), "the link at the end is not followed");
        assert!(local("away/y").is_err_and(|why| why.contains("(nfs)")));
        assert!(local("round/x").is_err_and(|why| why.contains("too many")));
    }
}
