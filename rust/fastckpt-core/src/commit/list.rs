//! Lists the checkpoints in a directory.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use super::content::files;
use super::directory::{TURNS, entries, id, id_of, open_child, refresh};
use super::names::{Kind, Temporary};
use super::recovery::{Free, is_free, taken_aside};
use crate::error::{Error, Result};
use crate::format::decode::{self, Head};
use crate::format::manifest;
use crate::sys::file::{open_directory, open_regular, read_at, stat};
use crate::sys::fs::{self, AtFlags, FileType};

/// A checkpoint in a directory.
#[derive(Debug, Clone)]
pub struct Listed {
    /// The name of the checkpoint.
    pub name: OsString,
    /// The path under which a load finds the checkpoint.
    pub path: PathBuf,
    /// Seconds since 1970 UTC when the save began; `None` if the manifest is damaged.
    pub created: Option<f64>,
    /// The size of its files, in bytes.
    pub bytes: u64,
    /// Whether a save moved the checkpoint aside and has put nothing in its place, so that no directory has its name. A
    /// load still finds it.
    pub aside: bool,
    /// What is wrong with the manifest or the files, as far as names and lengths show.
    pub damage: Option<String>,
}

/// Lists the checkpoints in `directory`, sorted by name: the directories that hold a manifest, and the checkpoints that
/// a killed save moved aside. Symbolic links are not followed. A workspace is not a checkpoint.
pub fn list(directory: &Path) -> Result<Vec<Listed>> {
    let parent = open_directory(directory).map_err(Error::io("list", directory))?;
    let parent = parent.as_fd();
    let mut found = Vec::new();
    for (name, kind) in entries(parent).map_err(Error::io("list", directory))? {
        let name = OsStr::from_bytes(name.to_bytes());
        let listed = match Temporary::parse(name.as_bytes()) {
            _ if kind != FileType::Directory => None,
            None => look(parent, name, name, directory),
            // The full name is unknown if the temporary name contains only its start.
            Some(t) if t.kind == Kind::Old && t.is_of(t.of()) && is_free(parent, t.of()) => {
                match taken_aside(parent, t.of()) {
                    Free::For(aside) if aside.name == name => look(parent, name, t.of(), directory),
                    _ => None,
                }
            }
            Some(_) => None,
        };
        found.extend(listed);
    }
    found.sort_unstable_by(|one: &Listed, other| one.name.cmp(&other.name));
    found.dedup_by(|one, other| one.name == other.name);
    Ok(found)
}

/// Examines the directory `found` in `parent` as the checkpoint `name`. Returns `None` if it is not a checkpoint, or if
/// it no longer exists.
fn look(parent: BorrowedFd<'_>, found: &OsStr, name: &OsStr, directory: &Path) -> Option<Listed> {
    for turn in 0..=TURNS {
        let inside = open_child(parent, found).ok()?;
        let expected = id(&fs::fstat(&inside).ok()?);
        let path = directory.join(name);
        let listed = look_inside(inside.as_fd(), &path).map(|(bytes, head)| {
            let (created, damage) = match head {
                Ok(head) => (Some(head.created), missing(inside.as_fd(), &head)),
                Err(error) => (None, Some(error.to_string())),
            };
            Listed { name: name.to_owned(), path, created, bytes, aside: found != name, damage }
        });
        let sound = listed.as_ref().is_some_and(|listed| listed.damage.is_none());
        refresh(parent);
        if sound || turn == TURNS || id_of(parent, found) == Some(expected) {
            return listed;
        }
        // The directory was replaced or removed meanwhile.
    }
    None
}

/// The size of the files of fastckpt in a directory, and its manifest; `None` if there is no manifest.
fn look_inside(directory: BorrowedFd<'_>, path: &Path) -> Option<(u64, Result<Head>)> {
    let files = files(directory).ok()?;
    let ours = files.all.iter().filter(|(file, kind)| *kind == FileType::RegularFile && files.has_own(file));
    let bytes = ours.filter_map(|(file, _)| {
        u64::try_from(fs::statat(directory, file, AtFlags::SYMLINK_NOFOLLOW).ok()?.st_size).ok()
    });
    let bytes = bytes.sum();
    files
        .all
        .iter()
        .any(|(file, _)| file.to_bytes() == manifest::FILE.as_bytes())
        .then(|| (bytes, head(directory, path)))
}

fn head(directory: BorrowedFd<'_>, path: &Path) -> Result<Head> {
    let path = path.join(manifest::FILE);
    let (fd, len) = open_regular(directory, manifest::FILE).map_err(Error::io("open", &path))?;
    if len > manifest::MAX_BYTES {
        return Err(Error::corrupt(
            &path,
            format!("{len} bytes are more than the {} allowed", manifest::MAX_BYTES),
        ));
    }
    let mut bytes = vec![0; len as usize];
    let read = read_at(fd.as_fd(), &mut bytes, 0).map_err(Error::io("read", &path))?;
    bytes.truncate(read);
    decode::decode_head(&bytes, &path)
}

/// The first shard that is missing or has the wrong length.
fn missing(directory: BorrowedFd<'_>, head: &Head) -> Option<String> {
    head.shards.iter().find_map(|shard| {
        let file = &shard.file;
        match stat(directory, file) {
            Ok(stat) if u64::try_from(stat.st_size) == Ok(shard.bytes) => None,
            Ok(stat) => Some(format!("shard `{file}` has {} bytes, expected {}", stat.st_size, shard.bytes)),
            Err(error) => Some(format!("shard `{file}` cannot be found: {error}")),
        }
    })
}

#[cfg(test)]
mod tests {
    use crate::commit::Workspace;
    use crate::commit::leftovers::tests::{dead, half, name_by};
    use crate::commit::names::aside_name;
    use crate::save::tests::saved;

    use super::*;

    fn names(all: &[Listed]) -> Vec<&str> {
        all.iter().map(|one| one.name.to_str().unwrap()).collect()
    }

    #[test]
    fn checkpoints_are_listed_by_name_and_nothing_else_is() {
        let parent = tempfile::tempdir().unwrap();
        let at = |name: &str| parent.path().join(name);
        assert_eq!(list(parent.path()).unwrap().len(), 0);
        for name in ["step-2", "step-10", "step-1"] {
            saved(&at(name), [1, 2]);
        }
        std::fs::write(at("step-1").join("config.json"), "{}").unwrap();
        std::fs::create_dir(at("logs")).unwrap();
        std::fs::write(at("notes.txt"), "").unwrap();
        std::os::unix::fs::symlink("step-10", at("latest")).unwrap();
        let _running = Workspace::create(&at("step-3"), true).unwrap();
        half(at(name_by("step-4", dead()).to_str().unwrap()));
        half(at(".step-5.del-elsewhere-0000000000000001-1-1-1-00000000"));
        let all = list(parent.path()).unwrap();
        assert_eq!(names(&all), ["step-1", "step-10", "step-2"]);
        let first = &all[0];
        assert!(first.damage.is_none() && !first.aside && first.path == at("step-1"));
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs_f64();
        assert!((now - first.created.unwrap()).abs() < 1000.0);
        let own =
            std::fs::read_dir(at("step-1")).unwrap().map(|file| file.unwrap().metadata().unwrap().len());
        assert_eq!(first.bytes, own.sum::<u64>() - 2);
        assert_eq!(list(&at("nowhere")).unwrap_err().errno(), Some(libc::ENOENT));
    }

    #[test]
    fn one_that_was_taken_aside_is_listed_once_under_its_name() {
        let parent = tempfile::tempdir().unwrap();
        let at = |name: &OsStr| parent.path().join(name);
        let path = at(OsStr::new("c"));
        for made in ["one", "two"] {
            let temporary = name_by("c", dead());
            let one = saved(&at(OsStr::new(made)), [1, 2]);
            std::fs::rename(one, at(&aside_name(&temporary, 0))).unwrap();
            half(at(&temporary));
            let all = list(parent.path()).unwrap();
            assert_eq!(names(&all), ["c"], "{made}");
            assert!(all[0].aside && all[0].damage.is_none() && all[0].path == path);
        }
        saved(&path, [1, 2]);
        let all = list(parent.path()).unwrap();
        assert!(names(&all) == ["c"] && !all[0].aside);
    }

    #[test]
    fn a_damaged_one_is_listed_with_what_is_wrong() {
        let parent = tempfile::tempdir().unwrap();
        let path = saved(&parent.path().join("c"), [1, 2]);
        let (manifest, shard) = (path.join(manifest::FILE), path.join("model-00002-of-00002.safetensors"));
        let damage = || {
            let all = list(parent.path()).unwrap();
            assert_eq!(names(&all), ["c"]);
            (all[0].damage.clone().unwrap_or_default(), all[0].created.is_some())
        };
        let sound = std::fs::read(&manifest).unwrap();
        std::fs::File::options().write(true).open(&shard).unwrap().set_len(4096).unwrap();
        let (text, created) = damage();
        assert!(text.contains("model-00002-of-00002.safetensors` has 4096 bytes") && created, "{text}");
        std::fs::remove_file(&shard).unwrap();
        assert!(damage().0.contains("cannot be found"));
        let mut flipped = sound.clone();
        flipped[200] ^= 1;
        for (bytes, why) in [
            (&flipped[..], "its checksum is"),
            (&sound[..sound.len() - 9], "its checksum is"),
            (b"", "does not begin as a manifest"),
            (b"{\"fastckpt\":99,", "format version 99"),
        ] {
            std::fs::write(&manifest, bytes).unwrap();
            let (text, created) = damage();
            assert!(text.contains(why) && !created, "{text}");
        }
    }
}
