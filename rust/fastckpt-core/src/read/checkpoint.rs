//! An open checkpoint. Reads and checks its manifest, opens its shards, keeps them open, and compares their headers.

use std::borrow::Cow;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use super::place::{Directory, Kept, Place};
use super::replaced::{self, DOUBT, PAUSE, has_other_name, is_gone, is_local, is_stale};
use crate::commit;
use crate::engine::io::files::ShardFile;
use crate::engine::io::object::{REQUESTS, Store};
use crate::engine::pool::Pool;
use crate::engine::report::Damage;
use crate::error::{Error, Result};
use crate::format::manifest::{self, Body};
use crate::format::{checksum, decode};
use crate::sys::file;
use crate::sys::fork::Held;

/// A checkpoint with more shards than this keeps none of them open. By default a process may have 1,024 open files, and
/// the rest of the program needs most of them.
const MOST: usize = 64;
/// Bytes per read that needs no worker (headers).
const SMALL_READ: usize = 1 << 20;

/// How long to keep reopening a checkpoint that is replaced again and again.
const REPLACED_WAIT: Duration = Duration::from_secs(30);
/// The number of bytes at the start of a manifest, its checksum among them, that distinguish it from all others.
const SEAL: usize = 64;
/// An open checkpoint: its manifest, read and checked.
#[derive(Debug)]
pub struct Checkpoint {
    pub(super) path: PathBuf,
    pub(super) place: Place,
    pub(super) body: Body,
    /// The first bytes of the manifest. They hold a checksum of the rest.
    seal: Vec<u8>,
    /// The shards whose headers were found to match their checksums, so that reads of single tensors do not check a
    /// header of megabytes each time.
    sound_headers: Vec<OnceLock<()>>,
}

impl Checkpoint {
    /// Opens the checkpoint at `path`.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_settled(path, false, None)
    }

    /// Opens the checkpoint at `path`, and all shards if there are at most 64. The shards stay open, so that they can
    /// be read after the checkpoint is replaced or removed, unless its file system resolves open files by name.
    pub fn open_and_keep(path: &Path) -> Result<Self> {
        Self::open_settled(path, true, None)
    }

    /// Opens the checkpoint at `path` with a manifest that another process read with [`Self::manifest`]. Only the
    /// beginning of the file is read: if it belongs to another manifest, the checkpoint was replaced. `keep` as in
    /// [`Self::open_and_keep`].
    pub fn open_known(path: &Path, manifest: &[u8], keep: bool) -> Result<Self> {
        Self::open_settled(path, keep, Some(manifest))
    }

    /// Opens the checkpoint in a store, at `url`. `known` is a known manifest, as in [`Self::open_known`].
    pub fn open_stored(url: &Path, store: Arc<dyn Store>, known: Option<&[u8]>) -> Result<Self> {
        let manifest = url.join(manifest::FILE);
        let begin = known.map(|known| known.len().min(SEAL));
        let found = store.manifest(begin).map_err(Error::io("read", &manifest))?;
        if known.zip(begin).is_some_and(|(known, begin)| found != known[..begin]) {
            return Err(Error::Replaced { path: url.to_path_buf() });
        }
        Self::decoded(url, Place::Store(store), known.map_or(found.into(), Cow::Borrowed), &manifest)
    }

    /// Reads the manifest again, and returns its bytes.
    pub fn manifest(&self) -> Result<Vec<u8>> {
        let manifest = self.path.join(manifest::FILE);
        let bytes = match &self.place {
            Place::Directory(Directory { fd, .. }) => {
                let (fd, len) = file::open_regular(fd.as_fd(), manifest::FILE)
                    .map_err(|error| self.unreadable(&manifest, error))?;
                Self::read_manifest(&manifest, &fd, len, || self.replaced())?
            }
            Place::Store(store) => store.manifest(None).map_err(Error::io("read", &manifest))?,
        };
        if bytes.starts_with(&self.seal) { Ok(bytes) } else { Err(self.replaced()) }
    }

    fn replaced(&self) -> Error {
        Error::Replaced { path: self.path.clone() }
    }

    /// Reads a manifest of `len` bytes.
    fn read_manifest(
        manifest: &Path,
        fd: &OwnedFd,
        len: u64,
        replaced: impl Fn() -> Error,
    ) -> Result<Vec<u8>> {
        if len > manifest::MAX_BYTES {
            let what = format!("{len} bytes are more than the {} allowed", manifest::MAX_BYTES);
            return Err(Error::corrupt(manifest, what));
        }
        let mut bytes = vec![0; len as usize];
        let read = file::read_at(fd.as_fd(), &mut bytes, 0)
            .map_err(|error| if is_gone(&error) { replaced() } else { Error::io("read", manifest)(error) })?;
        if read < bytes.len() {
            return Err(Error::corrupt(manifest, "it became shorter while it was read"));
        }
        Ok(bytes)
    }

    fn open_settled(path: &Path, keep: bool, mut known: Option<&[u8]>) -> Result<Self> {
        let give_up = Instant::now() + REPLACED_WAIT;
        let (mut doubt, given) = (None, known.is_some());
        loop {
            match Self::open_once(path, keep, &mut known) {
                // The error comes after the known manifest was matched. A second attempt would open another checkpoint.
                Err(error) if given && known.is_none() => return Err(error),
                // A client of a network file system may keep the manifest of an earlier checkpoint for a while.
                Err(error @ Error::Replaced { .. })
                    if given
                        && (is_local(path) || doubt.get_or_insert_with(Instant::now).elapsed() > DOUBT) =>
                {
                    return Err(error);
                }
                Err(Error::Replaced { .. }) if Instant::now() < give_up => {}
                // If a file system resolves open files by name, the manifest may be missing, or differ from one call to
                // the next. This does not apply to a path that is a file.
                Err(Error::Corrupt { .. } | Error::Foreign { .. })
                    if path.is_dir()
                        && !is_local(path)
                        && doubt.get_or_insert_with(Instant::now).elapsed() < DOUBT => {}
                other => return other,
            }
            std::thread::sleep(PAUSE);
        }
    }

    /// Opens the checkpoint, and takes the `known` manifest if there is one.
    fn open_once(path: &Path, keep: bool, known: &mut Option<&[u8]>) -> Result<Self> {
        let replaced = || Error::Replaced { path: path.to_path_buf() };
        let foreign = |why: &str| Error::Foreign { path: path.to_path_buf(), why: why.to_owned() };
        let directory = match commit::open_checkpoint(path) {
            Err(error) if error.errno() == Some(libc::ESTALE) => return Err(replaced()),
            Err(error) if error.errno() == Some(libc::ENOTDIR) && path.exists() => {
                return Err(foreign("it is not a directory"));
            }
            other => other?,
        };
        let manifest = path.join(manifest::FILE);
        let (fd, len) = match file::open_regular(directory.as_fd(), manifest::FILE) {
            Err(error) if is_gone(&error) => {
                if is_stale(&error) || has_other_name(&directory, path) {
                    return Err(replaced());
                }
                return Err(foreign(&format!("it holds no `{}`", manifest::FILE)));
            }
            other => other.map_err(|error| unreadable(&manifest, error))?,
        };
        let begin = known.map_or(0, |known| known.len().min(SEAL));
        let len = if known.is_some() { len.min(begin as u64) } else { len };
        let found = Self::read_manifest(&manifest, &fd, len, replaced)?;
        if known.is_some_and(|known| found != known[..begin]) {
            return Err(replaced());
        }
        let bytes = known.take().map_or(found.into(), Cow::Borrowed);
        let mut checkpoint =
            Self::decoded(path, Place::Directory(Directory::new(directory)), bytes, &manifest)?;
        if keep {
            checkpoint.keep()?;
        }
        Ok(checkpoint)
    }

    fn decoded(path: &Path, place: Place, bytes: Cow<'_, [u8]>, manifest: &Path) -> Result<Self> {
        let seal = bytes[..bytes.len().min(SEAL)].to_vec();
        let body = decode::decode(bytes, manifest)?;
        let sound_headers = body.shards.iter().map(|_| OnceLock::new()).collect();
        Ok(Self { path: path.to_path_buf(), place, body, seal, sound_headers })
    }

    /// The path of the checkpoint, as it was opened.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The directory of the checkpoint, if it is in one.
    #[must_use]
    pub fn directory(&self) -> Option<BorrowedFd<'_>> {
        match &self.place {
            Place::Directory(directory) => Some(directory.fd.as_fd()),
            Place::Store(_) => None,
        }
    }

    /// Whether the checkpoint is in an object store.
    #[must_use]
    pub fn is_stored(&self) -> bool {
        matches!(self.place, Place::Store(_))
    }

    /// The manifest.
    #[must_use]
    pub fn body(&self) -> &Body {
        &self.body
    }

    pub(super) fn is_replaced(&self, error: &io::Error) -> bool {
        match &self.place {
            Place::Directory(Directory { fd, certain, .. }) => {
                replaced::is_replaced(fd, &self.path, &self.seal, error, certain)
            }
            Place::Store(store) => match store.manifest(Some(self.seal.len())) {
                Ok(found) => found != self.seal,
                Err(error) => matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData),
            },
        }
    }

    /// Whether `error`, from a read, concerns the file and not the connection to it.
    pub(super) fn is_damage(&self, error: &io::Error) -> bool {
        !self.is_stored() || error.kind() == io::ErrorKind::NotFound
    }

    /// What `error` from an operation on this checkpoint means. On network file systems, files of a directory that
    /// another machine removed cause a special error, and in a mapping the error of a failing disk.
    pub(super) fn settle(&self, error: Error) -> Error {
        let replaced = match &error {
            Error::Io { source, .. } => {
                let may_be = match self.place {
                    Place::Directory(_) => matches!(source.raw_os_error(), Some(libc::ESTALE | libc::EIO)),
                    Place::Store(_) => source.kind() == io::ErrorKind::NotFound,
                };
                may_be && self.is_replaced(source)
            }
            Error::Corrupt { .. } => self.is_other(),
            _ => false,
        };
        if replaced { Error::Replaced { path: self.path.clone() } } else { error }
    }

    /// Whether apparent damage is not real, because the files belong to another checkpoint. If a file system resolves
    /// open files by name (FUSE), an open directory shows whatever another machine has put in its place.
    pub(super) fn is_other(&self) -> bool {
        self.is_far() && self.is_replaced(&io::Error::from_raw_os_error(libc::ENOENT))
    }

    /// Whether several machines may share the checkpoint's storage.
    pub(super) fn is_far(&self) -> bool {
        self.directory().is_none_or(|directory| commit::reach(directory) != commit::Reach::Machine)
    }

    pub(super) fn raised(&self, damage: Damage) -> Error {
        let Damage { file, offset, len, tensor, reason } = damage;
        let tensor = tensor.map_or_else(String::new, |name| format!(" (tensor `{name}`)"));
        Error::corrupt(&self.path_of(&file), format!("bytes {offset} to {}{tensor}: {reason}", offset + len))
    }

    /// Opens every shard that can be opened and keeps them open, if there are few of them.
    pub(super) fn keep(&mut self) -> Result<()> {
        let Some(directory) = self.directory().filter(|_| self.body.shards.len() <= MOST) else {
            return Ok(());
        };
        let mut files = Vec::with_capacity(self.body.shards.len());
        for shard in &self.body.shards {
            match file::open_regular(directory, &shard.file) {
                Ok((fd, _)) => files.push(Some(Held::from(fd))),
                Err(error) if is_gone(&error) && self.is_replaced(&error) => {
                    return Err(Error::Replaced { path: self.path.clone() });
                }
                // The shard is damaged, or no descriptor is left. The first read reports it.
                Err(_) => files.push(None),
            }
        }
        if let Place::Directory(directory) = &mut self.place {
            directory.kept = Kept { files, process: std::process::id() };
        }
        Ok(())
    }

    /// Opens a shard, whatever its length, and returns it with that length.
    pub(super) fn open_file(&self, index: usize, direct: bool) -> io::Result<(ShardFile, u64)> {
        self.place.open(index, &self.body.shards[index].file, direct)
    }

    /// Opens a shard and checks its length.
    pub(super) fn open_shard(&self, index: usize, direct: bool) -> Result<ShardFile> {
        let shard = &self.body.shards[index];
        let path = || self.path_of(&shard.file);
        match self.open_file(index, direct) {
            Ok((file, len)) if len == shard.bytes || fresh_length(&file) == Some(shard.bytes) => Ok(file),
            Ok((_, len)) => {
                Err(Error::corrupt(&path(), format!("it has {len} bytes, expected {}", shard.bytes)))
            }
            Err(error) => Err(self.unreadable(&path(), error)),
        }
    }

    /// Why a shard cannot be opened.
    pub(super) fn unreadable(&self, path: &Path, error: io::Error) -> Error {
        if is_gone(&error) && self.is_replaced(&error) {
            return Error::Replaced { path: self.path.clone() };
        }
        unreadable(path, error)
    }

    /// Compares the headers of `shards` with their checksums, except for those already compared. `progress` returns
    /// whether to go on.
    pub(super) fn check_headers(&self, shards: &[usize], progress: &mut dyn FnMut() -> bool) -> Result<()> {
        let todo: Vec<_> =
            shards.iter().filter(|&&shard| self.sound_headers[shard].get().is_none()).collect();
        // Over a network, reads wait in parallel.
        let threads = if self.is_stored() { REQUESTS } else { 0 };
        Pool::of("fastckpt-header", threads).run(todo.len(), progress, &|number| {
            if let Some(damage) = self.check_header(*todo[number])? {
                return Err(self.raised(damage));
            }
            let _ = self.sound_headers[*todo[number]].set(());
            Ok(())
        })
    }

    /// Compares the header of a shard with its checksum.
    pub(super) fn check_header(&self, index: usize) -> Result<Option<Damage>> {
        let shard = &self.body.shards[index];
        let path = || self.path_of(&shard.file);
        let (open, _) = self.open_file(index, false).map_err(|error| self.unreadable(&path(), error))?;
        let mut crc = checksum::of(&[]);
        let mut at = 0;
        let mut length_field = [0; 8];
        let mut piece = vec![0; SMALL_READ.min(shard.data_offset as usize)];
        while at < shard.data_offset {
            let want = piece.len().min((shard.data_offset - at) as usize);
            let got = open.read_at(&mut piece[..want], at);
            let got = got.map_err(|error| Error::io("read", &path())(error))?;
            if got == 0 {
                break;
            }
            for (field, byte) in length_field.iter_mut().skip(at as usize).zip(&piece[..got]) {
                *field = *byte;
            }
            crc = checksum::append(crc, &piece[..got]);
            at += got as u64;
        }
        // A forged manifest may have the right checksum for a header that other readers would read with another length.
        let begin = u64::from_le_bytes(length_field).checked_add(8);
        if at == shard.data_offset && begin != Some(at) {
            let reason = format!("header: its length field disagrees with data offset {at}");
            return Ok(Some(Damage { file: shard.file.clone(), offset: 0, len: 8, tensor: None, reason }));
        }
        let sound = at == shard.data_offset && checksum::to_hex(crc) == shard.header_crc;
        Ok((!sound).then(|| Damage {
            file: shard.file.clone(),
            offset: 0,
            len: shard.data_offset,
            tensor: None,
            reason: format!("header: checksum is {}, expected {}", checksum::to_hex(crc), shard.header_crc),
        }))
    }

    /// The path of a file inside the checkpoint, for messages. Call it only after an error: a store's Python code may
    /// run a signal handler, whose exception is lost here.
    pub(super) fn path_of(&self, file: &str) -> PathBuf {
        match &self.place {
            Place::Directory(_) => self.path.join(file),
            Place::Store(store) => store.path_of(file),
        }
    }
}

/// The length of a file according to the server of the file system. A client may still have the length of an earlier
/// file of the same name.
fn fresh_length(file: &ShardFile) -> Option<u64> {
    let ShardFile::Local(file) = file else { return None };
    commit::refresh(file.fd(false));
    u64::try_from(rustix::fs::fstat(file.fd(false)).ok()?.st_size).ok()
}

/// Why a file of a checkpoint cannot be opened. It is damage if the checkpoint itself is at fault.
fn unreadable(path: &Path, error: io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ENOENT) => Error::corrupt(path, "the file is missing"),
        Some(libc::ELOOP) => Error::corrupt(path, "the file is a symbolic link, which is not followed"),
        Some(libc::ENXIO | libc::ENODEV) => Error::corrupt(path, "not a regular file"),
        None if error.kind() == io::ErrorKind::InvalidInput => Error::corrupt(path, error.to_string()),
        _ => Error::io("open", path)(error),
    }
}
