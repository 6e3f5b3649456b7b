//! A copy of a checkpoint in progress: its files are gathered beside the target path, and become the checkpoint at the
//! target all at once (`docs/format.md`, 6.4).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::io::{Errno, retry_on_intr};
use rustix::rand::{GetRandomFlags, getrandom};

use super::content::{TORCH_METADATA, files};
use super::directory::{Id, TURNS, entries, id, id_of, open_child, refresh};
use super::incoming::Incoming;
use super::leftovers::sweep;
use super::locks::{Reach, reach};
use super::names::gathering_name;
use super::parents::open_or_make;
use super::target::{look, split_target};
use super::unfinished::{LOCK, throw_away};
use super::workspace::Workspace;
use crate::error::{Error, Result};
use crate::format::groups::plain_name;
use crate::format::manifest;
use crate::sys::file::{Located, open_regular};
use crate::sys::fork::Note;
use crate::sys::fs::{self, AtFlags, FileType, Mode, OFlags};
use crate::sys::lock;
use crate::sys::memory::Bytes;

/// How long to wait in all, and how long between attempts, while a process that removes leftovers holds the lock.
const PATIENCE: (Duration, Duration) = (Duration::from_secs(60), Duration::from_millis(10));
/// The suffix of an incomplete file. It begins with a dot.
const PART: &str = ".part";

/// The place where the files of one copy are gathered. Several processes may add files. The gathered files stay when
/// this is dropped, until the copy is published or abandoned.
#[derive(Debug)]
pub struct Gathering {
    parent: OwnedFd,
    parent_path: PathBuf,
    target: PathBuf,
    name: OsString,
    note: Note,
    directory: OwnedFd,
    id: Id,
    overwrite: bool,
    manifest: Vec<u8>,
    /// The lock file, on which all processes that gather here hold a shared lock.
    lock: (Note, File),
}

impl Gathering {
    /// Opens or creates the directory for a copy with this `manifest` at `target`. Removes incomplete files of dead
    /// processes in it.
    pub fn open(target: &Path, manifest: Vec<u8>, overwrite: bool) -> Result<Self> {
        let (parent_path, name) = split_target(target)?;
        let seal = manifest::seal_of(&manifest)
            .ok_or_else(|| Error::Invalid("copy: this is not a manifest of fastckpt".to_owned()))?;
        let name = (gathering_name(&name, seal), name);
        let parent = open_or_make(&parent_path)?;
        look(parent.as_fd(), &name.1, target, overwrite)?;
        // Leftovers of dead writers take space that the copy may need.
        sweep(parent.as_fd());
        let name = name.0;
        let path = parent_path.join(&name);
        let begin = Instant::now();
        let mut turn = 0;
        loop {
            match furnish(parent.as_fd(), &name) {
                Ok((directory, id, file)) => {
                    return Ok(Self {
                        parent,
                        parent_path,
                        target: target.to_path_buf(),
                        name,
                        note: Note::new(directory.as_fd()),
                        directory,
                        id,
                        overwrite,
                        manifest,
                        lock: (Note::new(file.as_fd()), file),
                    });
                }
                // The directory was removed before the lock was taken.
                Err(error) if is_gone(&error) && turn < TURNS => turn += 1,
                Err(error) if lock::is_taken(&error) && begin.elapsed() < PATIENCE.0 => {
                    std::thread::sleep(PATIENCE.1);
                }
                Err(error) => return Err(Error::io("gather files in", &path)(error)),
            }
        }
    }

    /// The directory in which the files are gathered.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.parent_path.join(&self.name)
    }

    fn path_of(&self, file: &str) -> PathBuf {
        self.path().join(file)
    }

    /// The complete files that are here, and their lengths.
    pub fn held(&self) -> Result<Vec<(String, u64)>> {
        refresh(&self.directory);
        let mut held = Vec::new();
        for (name, kind) in files(self.directory.as_fd()).map_err(Error::io("list", &self.path()))?.all {
            let Ok(name) = name.into_string() else { continue };
            if kind != FileType::RegularFile || !is_part(&name) {
                continue;
            }
            if let Ok(stat) = fs::statat(&self.directory, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
                held.push((name, u64::try_from(stat.st_size).unwrap_or(0)));
            }
        }
        Ok(held)
    }

    /// Creates a file of `nbytes` bytes, to be filled.
    pub fn begin(&self, nbytes: u64) -> Result<Incoming> {
        let name = part_name();
        Incoming::create(self.directory.as_fd(), &name, nbytes, true).map_err(|error| {
            self.unlink(&name);
            Error::io("create", &self.path_of(&name))(error)
        })
    }

    /// Writes `bytes` at `offset`, within the length of the file, and returns their CRC-64/NVME.
    pub fn write(&self, incoming: &Incoming, offset: u64, bytes: Bytes<'_>) -> Result<u64> {
        let fits = offset.checked_add(bytes.len() as u64).is_some_and(|end| end <= incoming.nbytes);
        if !fits {
            return Err(Error::Invalid(format!("copy: {} bytes do not fit at {offset}", bytes.len())));
        }
        incoming.write(offset, bytes).map_err(Error::io("write", &self.path_of(&incoming.name)))
    }

    /// Makes a filled file durable, and gives it its name.
    pub fn keep(&self, incoming: Incoming, name: &str) -> Result<()> {
        let path = self.path_of(name);
        let Incoming { name: part, file, .. } = incoming;
        let kept =
            check_name(name).and_then(|()| file.sync().map_err(Error::io("sync", &path))).and_then(|()| {
                let renamed = Located::make(self.directory.as_fd(), name).and_then(|to| {
                    Ok(fs::renameat(&self.directory, part.as_str(), to.directory(), to.name)?)
                });
                renamed.map_err(Error::io("name the file that was copied", &path))
            });
        kept.inspect_err(|_| self.unlink(&part))
    }

    /// Abandons an incomplete file.
    pub fn drop_part(&self, incoming: Incoming) {
        let Incoming { name, file, .. } = incoming;
        // The file is closed first: NFS keeps an open file under another name.
        drop(file);
        self.unlink(&name);
    }

    /// Takes over the file `name` from the directory `from` as a hard link, if it still has the device and inode
    /// `expected`. The bytes of that file were verified. They are durable when this returns.
    pub fn link(&self, from: &Path, name: &str, expected: Id) -> Result<()> {
        check_name(name)?;
        let part = part_name();
        let source = from.join(name);
        let link = || -> io::Result<()> {
            let from = open_child(fs::CWD, from.as_os_str())?;
            let source = Located::find(from.as_fd(), name)?;
            fs::linkat(source.directory(), source.name, &self.directory, part.as_str(), AtFlags::empty())?;
            let (file, _) = open_regular(self.directory.as_fd(), &part)?;
            if id(&fs::fstat(&file)?) != expected {
                return Err(Errno::STALE.into());
            }
            // Another program may have created the file without a sync, for example when a user copied it.
            retry_on_intr(|| fs::fsync(&file))?;
            let to = Located::make(self.directory.as_fd(), name)?;
            Ok(fs::renameat(&self.directory, part.as_str(), to.directory(), to.name)?)
        };
        let linked = link();
        // `part` still exists after an error, or if `name` was a link to the same file: such a rename does nothing.
        self.unlink(&part);
        linked.map_err(Error::io("link", &source))
    }

    /// Publishes the checkpoint of `files`, by name and length, which are all here: durably and all at once. Returns
    /// warnings. The caller gives up the gathered files after this.
    pub fn publish(&self, files: Vec<(String, u64)>) -> Result<Vec<String>> {
        let mut workspace = Workspace::create(&self.target, self.overwrite)?;
        for (file, _) in &files {
            check_name(file)?;
            let taken = workspace.take_gathered(self.directory.as_fd(), file);
            taken.map_err(Error::io("take over", &self.path_of(file)))?;
        }
        workspace.seal(files, &[], &self.manifest, || Ok(()))?;
        Ok(workspace.publish()?.warnings())
    }

    /// Removes the gathered files. Other processes that gather here fail. If the removal fails, the next save sweeps
    /// them, or they are listed among the leftovers.
    pub fn give_up(self) {
        let Self { parent, name, id, note, directory, lock, .. } = self;
        // They are closed first: NFS keeps an open file under another name.
        drop((note, directory, lock));
        let _ = throw_away(parent.as_fd(), &name, id);
    }

    fn unlink(&self, name: &str) {
        let _ = fs::unlinkat(&self.directory, name, AtFlags::empty());
    }
}

/// A new name for an incomplete file, different from the names that all other processes use.
fn part_name() -> String {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let mut random = [0u8; 8];
    if getrandom(&mut random[..], GetRandomFlags::empty()).is_err() {
        random = (u64::from(std::process::id()) << 32).to_be_bytes();
    }
    let number = u64::from_be_bytes(random) ^ COUNT.fetch_add(1, Ordering::Relaxed);
    format!(".{number:016x}{PART}")
}

/// Whether `name` belongs to a file of the copy, not to a file that exists only while files are gathered.
fn is_part(name: &str) -> bool {
    plain_name(name).is_some() || name == TORCH_METADATA
}

fn check_name(name: &str) -> Result<()> {
    if is_part(name) && name != manifest::FILE {
        Ok(())
    } else {
        Err(Error::Invalid(format!("copy: {name:?} is not the name of a file to copy")))
    }
}

fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESTALE))
}

/// Opens the directory `name`, which may be new, and takes a shared lock on its lock file.
fn furnish(parent: BorrowedFd<'_>, name: &OsStr) -> io::Result<(OwnedFd, Id, File)> {
    match fs::mkdirat(parent, name, Mode::from_raw_mode(0o777)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(error) => return Err(error.into()),
    }
    let directory = open_child(parent, name)?;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = File::from(retry_on_intr(|| fs::openat(&directory, LOCK, flags, Mode::from_raw_mode(0o666)))?);
    // On a file system without locks, other processes cannot be detected, so none of their files is removed.
    if lock::take(&file).is_ok() && reach(directory.as_fd()) != Reach::Unknown {
        clear(directory.as_fd())?;
    }
    match lock::share(&file) {
        Err(error) if lock::is_taken(&error) => return Err(error),
        _ => {}
    }
    let id = id(&fs::fstat(&directory)?);
    refresh(parent);
    if id_of(parent, name) == Some(id) { Ok((directory, id, file)) } else { Err(Errno::NOENT.into()) }
}

/// Removes incomplete files.
fn clear(directory: BorrowedFd<'_>) -> io::Result<()> {
    for (file, _) in entries(directory)? {
        if file.to_bytes().starts_with(b".") && file.to_bytes().ends_with(PART.as_bytes()) {
            fs::unlinkat(directory, &file, AtFlags::empty())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::commit::clean::{leftovers, remove_leftover};
    use crate::commit::leftovers::State;
    use crate::commit::tests::{checkpoint, content, names};
    use crate::format::checksum;
    use crate::sys::file::PAGE;

    use super::*;

    const SEAL: &str = "0123456789abcdef";

    fn manifest_of(text: &str) -> Vec<u8> {
        format!("{{\"fastckpt\":1,\"crc64nvme\":\"{SEAL}\",\n{text}").into_bytes()
    }

    fn open(path: &Path) -> Gathering {
        Gathering::open(path, manifest_of("one"), true).unwrap()
    }

    /// Adds a file with the content `text`.
    fn bring(gathering: &Gathering, name: &str, text: &[u8]) {
        let file = gathering.begin(text.len() as u64).unwrap();
        assert_eq!(gathering.write(&file, 0, text.into()).unwrap(), checksum::of(text));
        gathering.keep(file, name).unwrap();
    }

    #[test]
    fn what_is_gathered_becomes_the_checkpoint_at_once() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "zero");
        std::fs::write(path.join("notes.txt"), "mine").unwrap();
        let gathering = open(&path);
        bring(&gathering, "model.safetensors", b"shard");
        assert_eq!(gathering.held().unwrap(), [("model.safetensors".to_owned(), 5)]);
        assert!(content(&path).ends_with("zero"));
        assert!(gathering.publish(vec![("model.safetensors".to_owned(), 6)]).is_err(), "another length");
        assert!(content(&path).ends_with("zero"));
        gathering.publish(vec![("model.safetensors".to_owned(), 5)]).unwrap();
        assert!(content(&path).ends_with("one"));
        gathering.give_up();
        assert_eq!(names(&path), ["fastckpt.json", "model.safetensors", "notes.txt"]);
        assert_eq!(names(parent.path()), ["c"]);
    }

    #[test]
    fn what_is_whole_stays_for_the_next_one_and_what_is_not_goes() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        let gathering = open(&path);
        bring(&gathering, "model.safetensors", b"shard");
        let half = gathering.begin(9).unwrap();
        let place = gathering.path();
        let other = open(&path);
        assert_eq!(names(&place).len(), 3, "the other process is alive");
        drop((half, gathering, other));
        let again = open(&path);
        assert_eq!(names(&place), [LOCK, "model.safetensors"]);
        assert_eq!(again.held().unwrap().len(), 1);
        again.give_up();
        assert_eq!(names(parent.path()), [""; 0]);
    }

    #[test]
    fn a_save_sweeps_only_what_is_published() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        let gathering = open(&path);
        bring(&gathering, "model.safetensors", b"shard");
        let place = gathering.path();
        drop(gathering);
        drop(Workspace::create(&parent.path().join("d"), true).unwrap());
        assert!(place.exists());
        let gathering = open(&path);
        gathering.publish(vec![("model.safetensors".to_owned(), 5)]).unwrap();
        drop(Workspace::create(&parent.path().join("d"), true).unwrap());
        assert!(place.exists(), "the directory is in use");
        drop(gathering);
        drop(Workspace::create(&parent.path().join("d"), true).unwrap());
        assert_eq!(names(parent.path()), ["c"]);
    }

    #[test]
    fn it_is_listed_among_the_leftovers_and_removed_when_nobody_gathers() {
        let parent = tempfile::tempdir().unwrap();
        let gathering = open(&parent.path().join("c"));
        bring(&gathering, "model.safetensors", b"shard");
        let state = || {
            leftovers(parent.path()).unwrap().into_iter().map(|one| (one.of, one.state)).collect::<Vec<_>>()
        };
        let name = gathering.name.clone();
        assert_eq!(state(), [("c".to_owned(), State::Alive)]);
        assert!(!remove_leftover(parent.path(), &name, true).unwrap());
        drop(gathering);
        assert_eq!(state(), [("c".to_owned(), State::Dead)]);
        assert!(remove_leftover(parent.path(), &name, false).unwrap());
        // A directory whose maker was killed right after `mkdir`, and then a directory of another program.
        std::fs::create_dir(parent.path().join(&name)).unwrap();
        assert_eq!(state(), [("c".to_owned(), State::Dead)]);
        std::fs::write(parent.path().join(&name).join("mine"), "").unwrap();
        assert_eq!(state(), [("c".to_owned(), State::Foreign)]);
        assert!(!remove_leftover(parent.path(), &name, true).unwrap());
    }

    #[test]
    fn a_link_is_of_the_file_that_was_verified() {
        let parent = tempfile::tempdir().unwrap();
        let from = parent.path().join("a");
        std::fs::create_dir(&from).unwrap();
        std::fs::write(from.join("model.safetensors"), "shard").unwrap();
        let stat = fs::stat(from.join("model.safetensors")).unwrap();
        let gathering = open(&parent.path().join("c"));
        let (device, inode) = id(&stat);
        assert!(gathering.link(&from, "model.safetensors", (device, inode + 1)).is_err());
        assert_eq!(gathering.held().unwrap(), []);
        gathering.link(&from, "model.safetensors", (device, inode)).unwrap();
        gathering.link(&from, "model.safetensors", (device, inode)).unwrap();
        assert_eq!(fs::stat(gathering.path().join("model.safetensors")).unwrap().st_ino, inode);
        assert_eq!(names(&gathering.path()), [LOCK, "model.safetensors"]);
    }

    #[test]
    fn names_that_would_lead_elsewhere_and_bytes_that_do_not_fit_are_refused() {
        let parent = tempfile::tempdir().unwrap();
        let gathering = open(&parent.path().join("c"));
        for name in ["", ".lock", "../x", "a/b", "training/../x", "training/.x", "fastckpt.json"] {
            let file = gathering.begin(0).unwrap();
            assert!(gathering.keep(file, name).is_err(), "{name}");
        }
        let file = gathering.begin(4).unwrap();
        assert!(gathering.write(&file, 0, (&b"12345"[..]).into()).is_err());
        assert!(gathering.write(&file, u64::MAX, (&b"1"[..]).into()).is_err());
        gathering.drop_part(file);
        assert!(Gathering::open(&parent.path().join("d"), b"{}".to_vec(), true).is_err());
    }

    #[test]
    fn bytes_of_any_place_and_length_are_written() {
        let parent = tempfile::tempdir().unwrap();
        let gathering = open(&parent.path().join("c"));
        let bytes: Vec<u8> = (0..3 * PAGE as usize + 77).map(|at| (at * 7 % 251) as u8).collect();
        let file = gathering.begin(bytes.len() as u64).unwrap();
        for range in [0..4096, 4096..5000, 5000..8192, 8192..bytes.len()] {
            gathering.write(&file, range.start as u64, (&bytes[range]).into()).unwrap();
        }
        gathering.keep(file, "config.json").unwrap();
        assert!(std::fs::read(gathering.path().join("config.json")).unwrap() == bytes);
    }
}
