//! The names that a checkpoint has beside its target while it is built or replaced (`docs/format.md`, 6).

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use rustix::rand::{GetRandomFlags, getrandom};

use crate::checksum;

/// The host that writes: with the lock the proof of life.
pub(super) fn host() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '_' };
    let host: String = name.chars().take(64).map(plain).collect();
    if host.is_empty() { "_".into() } else { host }
}

/// Its boot, eight digits.
fn boot() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot: String = boot.chars().filter(char::is_ascii_hexdigit).take(8).collect();
    format!("{boot:0<8}")
}

/// What every temporary name for checkpoint `name` begins with.
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

/// A new temporary name.
pub(super) fn temporary_name(name: &OsStr, kind: &str) -> OsString {
    let (host, boot) = (host(), boot());
    let mut random = [0u8; 4];
    if getrandom(&mut random[..], GetRandomFlags::empty()).is_err() {
        // A name already taken is refused by mkdir and tried again, so this need not be unpredictable.
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        random = now.map_or(0, |now| now.subsec_nanos()).to_be_bytes();
    }
    let random = u32::from_be_bytes(random);
    let mut all = stem(name);
    let owner = format!("{host}-{boot}-{}-{random:08x}", std::process::id());
    all.extend_from_slice(format!(".{kind}-{owner}").as_bytes());
    OsString::from_vec(all)
}

/// What a temporary name says.
pub(super) struct Temporary<'a> {
    /// See [`stem`].
    stem: &'a [u8],
    /// `tmp` or `old`.
    pub(super) kind: &'a [u8],
    pub(super) host: &'a [u8],
}

impl<'a> Temporary<'a> {
    /// Takes a name apart that [`temporary_name`] made; any other is none.
    pub(super) fn parse(name: &'a [u8]) -> Option<Self> {
        // From the end, because a checkpoint's own name may hold anything.
        let mut parts = name.rsplitn(5, |&byte| byte == b'-');
        let hex8 = |part: &[u8]| part.len() == 8 && part.iter().all(u8::is_ascii_hexdigit);
        let random = parts.next().filter(|part| hex8(part));
        let pid = parts.next().filter(|part| !part.is_empty() && part.iter().all(u8::is_ascii_digit));
        let boot = parts.next().filter(|part| hex8(part));
        random.and(pid).and(boot)?;
        let host = parts.next()?;
        let begin = parts.next()?;
        let (stem, kind) = begin.split_at_checked(begin.len().checked_sub(4)?)?;
        let kind = kind.strip_prefix(b".")?;
        (stem.len() > 1 && stem.starts_with(b".") && [b"tmp", b"old"].iter().any(|known| kind == *known))
            .then_some(Self { stem, kind, host })
    }

    /// Whether it belongs to checkpoint `name`.
    pub(super) fn is_of(&self, name: &OsStr) -> bool {
        stem(name) == self.stem
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn temporary_names_are_taken_apart_as_they_were_made() {
        for name in ["c", "step-1000", "a.tmp-x", &"n".repeat(300)] {
            let name = OsStr::new(name);
            let made = temporary_name(name, "old");
            let parsed = Temporary::parse(made.as_bytes()).unwrap();
            assert!(parsed.is_of(name) && parsed.kind == b"old");
            assert_eq!(parsed.host, host().as_bytes());
        }
        for other in
            [".c.tmp-backup", "c.tmp-h-00000000-1-00000000", ".c.new-h-00000000-1-00000000", ".c.tmp-h-0-1-2"]
        {
            assert!(Temporary::parse(other.as_bytes()).is_none(), "{other}");
        }
        let nested = temporary_name(OsStr::new("c.old-x"), "tmp");
        assert!(!Temporary::parse(nested.as_bytes()).unwrap().is_of(OsStr::new("c")));
    }
}
