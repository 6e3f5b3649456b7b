//! The shards of an open checkpoint: opened, kept open, their headers compared.

use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use super::Checkpoint;
use super::replaced::is_gone;
use crate::commit;
use crate::engine::report::Damage;
use crate::error::{Error, Result};
use crate::format::checksum;
use crate::sys::file::{self, DataFile};
use crate::sys::fork::Held;

/// A checkpoint of more shards than this keeps none open: a process may have 1,024 files open by default, and most are not for us.
const MOST: usize = 64;
/// Reads in pieces of this many bytes where no worker is needed (headers).
const SMALL_READ: usize = 1 << 20;

/// Shards that stay open, so that they can be read after the checkpoint was replaced or removed. A forked child does not have them,
/// and opens its own.
#[derive(Debug, Default)]
pub(super) struct Kept {
    files: Vec<Option<Held>>,
    process: u32,
}

impl Checkpoint {
    /// Opens every shard that can be opened, if they are few, and keeps them open.
    pub(super) fn keep(&mut self) -> Result<()> {
        if self.body.shards.len() > MOST {
            return Ok(());
        }
        let mut files = Vec::with_capacity(self.body.shards.len());
        for shard in &self.body.shards {
            match file::open_regular(self.directory.as_fd(), &shard.file) {
                Ok((fd, _)) => files.push(Some(Held::from(fd))),
                Err(error) if is_gone(&error) && self.is_replaced(&error) => {
                    return Err(Error::Replaced { path: self.path.clone() });
                }
                // Damage, or no descriptor left: for the first read to tell.
                Err(_) => files.push(None),
            }
        }
        self.kept = Kept { files, process: std::process::id() };
        Ok(())
    }

    /// Opens a shard, which has what length it has.
    pub(super) fn open_file(&self, index: usize, direct: bool) -> io::Result<(DataFile, u64)> {
        let ours = self.kept.process == std::process::id();
        match self.kept.files.get(index) {
            Some(Some(kept)) if ours => DataFile::open_again(kept.as_fd(), direct),
            _ => DataFile::open_read(self.directory.as_fd(), &self.body.shards[index].file, direct),
        }
    }

    /// Opens a shard and looks at its length.
    pub(super) fn open_shard(&self, index: usize, direct: bool) -> Result<DataFile> {
        let shard = &self.body.shards[index];
        let path = self.path_of(&shard.file);
        match self.open_file(index, direct) {
            Ok((file, len)) if len == shard.bytes || fresh_length(&file) == Some(shard.bytes) => Ok(file),
            Ok((_, len)) => {
                Err(Error::corrupt(&path, format!("it has {len} bytes, written were {}", shard.bytes)))
            }
            Err(error) => Err(self.unreadable(&path, error)),
        }
    }

    /// Why a shard cannot be opened.
    pub(super) fn unreadable(&self, path: &Path, error: io::Error) -> Error {
        if is_gone(&error) && self.is_replaced(&error) {
            return Error::Replaced { path: self.path.clone() };
        }
        unreadable(path, error)
    }

    /// Compares the headers of `shards` with their checksums, those that were not yet.
    pub(super) fn check_headers(&self, shards: &[usize]) -> Result<()> {
        for &shard in shards.iter().filter(|&&shard| self.sound_headers[shard].get().is_none()) {
            if let Some(damage) = self.check_header(shard)? {
                return Err(self.raised(damage));
            }
            let _ = self.sound_headers[shard].set(());
        }
        Ok(())
    }

    /// Compares the header of a shard with its checksum.
    pub(super) fn check_header(&self, index: usize) -> Result<Option<Damage>> {
        let shard = &self.body.shards[index];
        let path = self.path_of(&shard.file);
        let (open, _) = self.open_file(index, false).map_err(|error| self.unreadable(&path, error))?;
        let mut crc = checksum::of(&[]);
        let mut at = 0;
        let mut length_field = [0; 8];
        let mut piece = vec![0; SMALL_READ.min(shard.data_offset as usize)];
        while at < shard.data_offset {
            let want = piece.len().min((shard.data_offset - at) as usize);
            let got =
                file::read_at(open.fd(false), &mut piece[..want], at).map_err(Error::io("read", &path))?;
            if got == 0 {
                break;
            }
            for (field, byte) in length_field.iter_mut().skip(at as usize).zip(&piece[..got]) {
                *field = *byte;
            }
            crc = checksum::append(crc, &piece[..got]);
            at += got as u64;
        }
        // A forged manifest may vouch for a header that other readers would take for another length.
        let begin = u64::from_le_bytes(length_field).checked_add(8);
        if at == shard.data_offset && begin != Some(at) {
            let reason = format!("header: its length field puts the data elsewhere than at byte {at}");
            return Ok(Some(Damage { file: shard.file.clone(), offset: 0, len: 8, tensor: None, reason }));
        }
        let sound = at == shard.data_offset && checksum::to_hex(crc) == shard.header_crc;
        Ok((!sound).then(|| Damage {
            file: shard.file.clone(),
            offset: 0,
            len: shard.data_offset,
            tensor: None,
            reason: format!(
                "header: checksum is {}, written was {}",
                checksum::to_hex(crc),
                shard.header_crc
            ),
        }))
    }

    /// The path of a file inside, for messages.
    pub(super) fn path_of(&self, file: &str) -> PathBuf {
        self.path.join(file)
    }
}

/// The length of a file as the file system's server has it: what a client knows may be that of a file of the same name before.
fn fresh_length(file: &DataFile) -> Option<u64> {
    commit::refresh(file.fd(false));
    u64::try_from(rustix::fs::fstat(file.fd(false)).ok()?.st_size).ok()
}

/// Why a file of a checkpoint cannot be opened: damage where the checkpoint itself is at fault.
pub(super) fn unreadable(path: &Path, error: io::Error) -> Error {
    match error.raw_os_error() {
        Some(libc::ENOENT) => Error::corrupt(path, "the file is missing"),
        Some(libc::ELOOP) => Error::corrupt(path, "the file is a symbolic link, which is not followed"),
        Some(libc::ENXIO | libc::ENODEV) => Error::corrupt(path, "not a regular file"),
        None if error.kind() == io::ErrorKind::InvalidInput => Error::corrupt(path, error.to_string()),
        _ => Error::io("open", path)(error),
    }
}
