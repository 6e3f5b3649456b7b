//! The names of a checkpoint beside its target path while it is built or replaced (`docs/format.md`, 6).

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use rustix::rand::{GetRandomFlags, getrandom};

use super::owner::Owner;
use crate::format::checksum;

/// The meaning of a temporary name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// A workspace. For a moment after an exchange of names, it is the old checkpoint.
    Tmp,
    /// The old checkpoint between two plain renames.
    Old,
    /// Garbage: any process may remove it.
    Del,
}

impl Kind {
    const ALL: [(Self, &'static str); 3] = [(Self::Tmp, "tmp"), (Self::Old, "old"), (Self::Del, "del")];

    pub(super) fn word(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

/// The start of every temporary name for checkpoint `name`.
fn stem(name: &OsStr) -> Vec<u8> {
    let mut stem = b".".to_vec();
    let bytes = name.as_bytes();
    if bytes.len() <= 120 {
        stem.extend_from_slice(bytes);
    } else {
        stem.extend_from_slice(&bytes[..120]);
        stem.extend_from_slice(checksum::to_hex(checksum::of(bytes)).as_bytes());
    }
    stem
}

fn compose(stem: &[u8], kind: Kind, workspace: &[u8]) -> OsString {
    OsString::from_vec([stem, b".", kind.word().as_bytes(), b"-", workspace].concat())
}

/// The part of the name after the kind. It identifies the writing process and one of its workspaces.
fn workspace() -> String {
    let mut random = [0u8; 4];
    if getrandom(&mut random[..], GetRandomFlags::empty()).is_err() {
        // This need not be unpredictable: `mkdir` refuses a name that is taken, and the caller tries another one.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        random = now.map_or(0, |now| now.subsec_nanos()).to_be_bytes();
    }
    format!("{}-{:08x}", Owner::myself(), u32::from_be_bytes(random))
}

/// A new name for a workspace of checkpoint `name`.
pub(super) fn workspace_name(name: &OsStr) -> OsString {
    compose(&stem(name), Kind::Tmp, workspace().as_bytes())
}

/// The name for the old checkpoint that gives its name to the workspace `temporary`, at the given attempt. No two
/// attempts share a name: a process that judges the leftovers of one attempt must not find those of the next one.
pub(super) fn aside_name(temporary: &OsStr, attempt: u8) -> OsString {
    let parsed = Temporary::parse(temporary.as_bytes());
    let mut name = parsed.map_or_else(OsString::new, |t| compose(t.stem, Kind::Old, t.workspace));
    name.push(format!("{attempt:02x}"));
    name
}

/// A name beside the workspace `temporary` that no sweep removes, for a directory that fastckpt did not write.
pub(super) fn displaced_name(temporary: &OsStr) -> OsString {
    let mut name = temporary.to_owned();
    name.push(".displaced");
    name
}

/// The part of a directory's name that marks it as the place where the files of a copy are gathered.
const COPY: &[u8] = b".copy-";

/// The name of the directory in which copies are gathered that become `name`. `seal` is the checksum of the
/// checkpoint's manifest.
pub(super) fn gathering_name(name: &OsStr, seal: &str) -> OsString {
    OsString::from_vec([&stem(name), COPY, seal.as_bytes()].concat())
}

/// The inverse of [`gathering_name`]: the name and the checksum. A long name is cut to its start.
pub(super) fn parse_gathering(name: &OsStr) -> Option<(&OsStr, &str)> {
    let (stem, seal) = name.as_bytes().split_at_checked(name.len().checked_sub(checksum::HEX)?)?;
    checksum::from_hex(seal)?;
    let of = stem.strip_suffix(COPY)?.strip_prefix(b".").filter(|of| !of.is_empty())?;
    Some((OsStr::from_bytes(of), std::str::from_utf8(seal).ok()?))
}

/// The parts of a temporary name.
#[derive(Debug, Clone, Copy)]
pub(super) struct Temporary<'a> {
    /// See [`stem`].
    stem: &'a [u8],
    pub(super) kind: Kind,
    /// Its maker and random digits. An old checkpoint and the workspace that takes its place have the same ones.
    workspace: &'a [u8],
}

impl<'a> Temporary<'a> {
    /// Parses a name that this module made; `None` for any other name.
    pub(super) fn parse(name: &'a [u8]) -> Option<Self> {
        // Parses from the end, because the checkpoint's own name may contain anything.
        let mut parts = name.rsplitn(7, |&byte| byte == b'-');
        let random = parts.next()?;
        let owner = Owner::parse([parts.next()?, parts.next()?, parts.next()?, parts.next()?])?;
        let (host, begin) = (parts.next()?, parts.next()?);
        let (stem, word) = begin.split_at_checked(begin.len().checked_sub(4)?)?;
        let word = word.strip_prefix(b".")?;
        let (kind, _) = Kind::ALL.into_iter().find(|(_, known)| known.as_bytes() == word)?;
        let digits = if kind == Kind::Old { 10 } else { 8 };
        let sound = random.len() == digits && random.iter().all(u8::is_ascii_hexdigit);
        if !sound || host.is_empty() || owner.pid == 0 || stem.len() < 2 || !stem.starts_with(b".") {
            return None;
        }
        let workspace = &name[begin.len() + 1..name.len() - (digits - 8)];
        Some(Self { stem, kind, workspace })
    }

    /// Whether the temporary name belongs to checkpoint `name`.
    pub(super) fn is_of(&self, name: &OsStr) -> bool {
        stem(name) == self.stem
    }

    /// The checkpoint's own name. If it is longer than 120 bytes, its first 120 bytes and a checksum.
    pub(super) fn of(&self) -> &'a OsStr {
        OsStr::from_bytes(&self.stem[1..])
    }

    /// The process that made this name.
    pub(super) fn owner(&self) -> Option<Owner> {
        let mut parts = self.workspace.rsplitn(6, |&byte| byte == b'-').skip(1);
        Owner::parse([parts.next()?, parts.next()?, parts.next()?, parts.next()?])
    }

    /// The host on which this name was made, for display only: host names prove nothing.
    pub(super) fn host(&self) -> String {
        let end = self.workspace.iter().position(|&byte| byte == b'-').unwrap_or(0);
        String::from_utf8_lossy(&self.workspace[..end]).into_owned()
    }

    /// The name of the workspace that this name belongs to.
    pub(super) fn workspace(&self) -> OsString {
        compose(self.stem, Kind::Tmp, self.workspace)
    }

    /// A new name for the directory, made by this process.
    pub(super) fn renamed(&self, kind: Kind) -> OsString {
        compose(self.stem, kind, workspace().as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_gathered_copies_are_taken_apart_as_they_were_made() {
        for name in ["c", "step-1000", "a.copy-x", &"n".repeat(255)] {
            let name = OsStr::new(name);
            let made = gathering_name(name, "0123456789abcdef");
            let (of, seal) = parse_gathering(&made).unwrap();
            assert!(made.len() <= 255 && seal == "0123456789abcdef");
            assert!(of == name || of.len() == 136 && of.as_bytes().starts_with(&[b'n'; 120]));
            assert!(Temporary::parse(made.as_bytes()).is_none());
        }
        for other in
            ["c.copy-0123456789abcdef", ".copy-0123456789abcdef", ".c.copy-", ".c.copy-0123456789ABCDEF"]
        {
            assert!(parse_gathering(OsStr::new(other)).is_none(), "{other}");
        }
    }

    #[test]
    fn temporary_names_are_taken_apart_as_they_were_made() {
        for name in ["c", "step-1000", "a.tmp-x", &"n".repeat(255)] {
            let name = OsStr::new(name);
            let made = workspace_name(name);
            let parsed = Temporary::parse(made.as_bytes()).unwrap();
            assert!(parsed.is_of(name) && parsed.kind == Kind::Tmp && made.len() <= 255);
            assert_eq!((parsed.workspace(), parsed.owner()), (made.clone(), Some(Owner::myself())));
            let aside = aside_name(&made, 255);
            let old = Temporary::parse(aside.as_bytes()).unwrap();
            assert!(old.is_of(name) && old.kind == Kind::Old && aside.len() <= 255);
            assert_eq!((old.workspace(), old.owner()), (made.clone(), Some(Owner::myself())));
            let garbage = old.renamed(Kind::Del);
            let garbage = Temporary::parse(garbage.as_bytes()).unwrap();
            assert!(garbage.is_of(name) && garbage.kind == Kind::Del);
        }
        for other in [
            ".c.tmp-backup",
            "c.tmp-h-0000000000000000-1-1-1-00000000",
            ".c.new-h-0000000000000000-1-1-1-00000000",
            ".c.tmp-h-0-1-1-1-00000000",
            ".c.tmp-h-0000000000000000-1-0-1-00000000",
            ".c.old-h-0000000000000000-1-1-1-00000000",
            ".c.tmp-h-0000000000000000-1-1-1-0000000000",
            ".c.tmp--0000000000000000-1-1-1-00000000",
        ] {
            assert!(Temporary::parse(other.as_bytes()).is_none(), "{other}");
        }
        let nested = workspace_name(OsStr::new("c.old-x"));
        assert!(!Temporary::parse(nested.as_bytes()).unwrap().is_of(OsStr::new("c")));
    }
}
