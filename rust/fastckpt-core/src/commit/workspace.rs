//! The directory in which a checkpoint is built. One process creates and seals it, and other processes can join it. A
//! workspace that is never published is removed.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::io::{Errno, retry_on_intr};

use super::directory::{Id, OWNER, TURNS, id, id_of, open_child, refresh};
use super::leftovers::{remove, sweep};
use super::locks::orders_names;
use super::names::{Kind, Temporary, workspace_name};
use super::parents::open_or_make;
use super::target::{look, split_target};
use super::unfinished::sweep_finished;
use crate::error::{Error, Result, Visible};
use crate::format::manifest;
use crate::sys::calls::{self, Closing};
use crate::sys::file::{open_directory, start_write_back, stat, sync};
use crate::sys::fork::Note;
use crate::sys::fs::{self, AtFlags, FileType, Mode, OFlags};
use crate::sys::lock;

/// A checkpoint that is being built beside its target path. The process that created the workspace and processes that
/// joined it write files into [`Workspace::directory`]. The creator seals and publishes the workspace. If the creator
/// drops it without publishing it, it is removed.
#[derive(Debug)]
pub struct Workspace {
    pub(super) parent: OwnedFd,
    pub(super) parent_path: PathBuf,
    pub(super) target: PathBuf,
    pub(super) name: OsString,
    pub(super) temporary: OsString,
    _note: Note,
    directory: OwnedFd,
    pub(super) id: Id,
    pub(super) overwrite: bool,
    /// `None` in a process that joined.
    pub(super) own: Option<Own>,
}

/// State that only the creator of a workspace has.
#[derive(Debug)]
pub(super) struct Own {
    /// Empty until the workspace is sealed. The lock proves that the writer is alive. A forked child does not keep it.
    manifest: (Note, Closing<File>),
    /// The directory that was current at the target path when the save began.
    pub(super) before: Option<Id>,
    /// The mode of the directory that was current.
    pub(super) mode: Option<u32>,
    /// The process that removes the workspace if it is never published. A forked child must not remove it.
    process: u32,
    /// The files beside the manifest and their sizes, once the workspace is sealed.
    pub(super) sealed: Option<Vec<(String, u64)>>,
}

impl Workspace {
    /// Creates missing parents of the target path, checks the path, sweeps leftovers of dead writers beside it, and
    /// creates the temporary directory.
    pub fn create(target: &Path, overwrite: bool) -> Result<Self> {
        let (parent_path, name) = split_target(target)?;
        let parent = open_or_make(&parent_path)?;
        let old = look(parent.as_fd(), &name, target, overwrite)?;
        sweep(parent.as_fd());
        sweep_finished(parent.as_fd());
        let about = (old.as_ref().map(|old| old.id), old.as_ref().map(|old| old.mode));
        let made = Self::begin((parent, parent_path), name, target, overwrite, about);
        // Until here, no other directory may get the id of the old one.
        drop(old);
        made
    }

    /// Creates the temporary directory in `parent` for the checkpoint `name`. The caller passes the id and the mode of
    /// the directory that has the name now.
    pub(super) fn begin(
        (parent, parent_path): (OwnedFd, PathBuf),
        name: OsString,
        target: &Path,
        overwrite: bool,
        (before, mode): (Option<Id>, Option<u32>),
    ) -> Result<Self> {
        let failed = |error: Errno| Error::io("create a temporary directory in", &parent_path)(error);
        let mut turn = 0;
        loop {
            turn += 1;
            let temporary = workspace_name(&name);
            match fs::mkdirat(&parent, &temporary, Mode::from_raw_mode(0o777)) {
                // A FUSE daemon and an NFS server look up what they have just created. A sweep on another machine may
                // have removed it before that.
                Err(Errno::EXIST | Errno::NOENT | Errno::STALE) if turn < TURNS => continue,
                other => other.map_err(failed)?,
            }
            match furnish(parent.as_fd(), &temporary, mode) {
                Ok((directory, id, manifest)) => {
                    return Ok(Self {
                        parent,
                        parent_path,
                        target: target.to_path_buf(),
                        name,
                        temporary,
                        _note: Note::new(directory.as_fd()),
                        directory,
                        id,
                        overwrite,
                        own: Some(Own {
                            manifest: (Note::new(manifest.as_fd()), manifest.into()),
                            before,
                            mode,
                            process: std::process::id(),
                            sealed: None,
                        }),
                    });
                }
                // A sweep may find the directory before its manifest exists and is locked. In that case, it has removed
                // the directory.
                Err(Errno::NOENT | Errno::STALE) if turn < TURNS => discard(parent.as_fd(), &temporary),
                Err(error) => {
                    discard(parent.as_fd(), &temporary);
                    return Err(Error::io("open the temporary directory in", &parent_path)(error));
                }
            }
        }
    }

    /// Opens the workspace `temporary` (see [`Workspace::temporary`]) that another process created for `target`, to
    /// write files into it. A process that joined can neither seal nor publish it, and dropping it removes nothing.
    pub fn join(target: &Path, temporary: &OsStr) -> Result<Self> {
        let (parent_path, name) = split_target(target)?;
        let parent = open_directory(&parent_path).map_err(Error::io("join a save in", &parent_path))?;
        let path = parent_path.join(temporary);
        let refused =
            |why: &str| Error::Invalid(format!("cannot join `{}`: {why}", Visible(&path.display())));
        let bytes = temporary.as_bytes();
        let ours = Temporary::parse(bytes).is_some_and(|t| t.kind == Kind::Tmp && t.is_of(&name));
        if !ours || bytes.contains(&b'/') {
            return Err(refused("it is not the name of a workspace of this checkpoint"));
        }
        // Another machine may have created it just now.
        refresh(&parent);
        let directory = open_child(parent.as_fd(), temporary).map_err(Error::io("join", &path))?;
        let stat = fs::fstat(&directory).map_err(Error::io("join", &path))?;
        match fs::statat(&directory, manifest::FILE, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if stat.st_size == 0 => {}
            // It is sealed, or it is an old checkpoint that a commit has just displaced.
            Ok(_) => return Err(refused("it is sealed")),
            Err(Errno::NOENT) => return Err(refused("it is not a workspace")),
            Err(error) => return Err(Error::io("join", &path)(error)),
        }
        Ok(Self {
            parent,
            parent_path,
            target: target.to_path_buf(),
            name,
            temporary: temporary.to_owned(),
            _note: Note::new(directory.as_fd()),
            id: id(&stat),
            directory,
            overwrite: false,
            own: None,
        })
    }

    /// Whether this process created the workspace, and therefore seals it.
    pub(crate) fn is_own(&self) -> bool {
        self.own.is_some()
    }

    /// The name beside the target path, for other processes to join.
    #[must_use]
    pub fn temporary(&self) -> &OsStr {
        &self.temporary
    }

    /// The directory in which to create shards.
    #[must_use]
    pub fn directory(&self) -> BorrowedFd<'_> {
        self.directory.as_fd()
    }

    /// The current path of a file of the checkpoint, for messages.
    #[must_use]
    pub fn path_of(&self, file: &str) -> PathBuf {
        self.parent_path.join(&self.temporary).join(file)
    }

    /// Refuses to write into a workspace that another process created and has sealed since then: it may already have
    /// the checkpoint's name. This is a single check. The creator must not seal the workspace while others write.
    pub(crate) fn check_open(&self) -> Result<()> {
        if self.own.is_some() {
            return Ok(());
        }
        match fs::statat(&self.directory, manifest::FILE, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if stat.st_size == 0 => Ok(()),
            Ok(_) => Err(self.refused("write into", "it is sealed")),
            Err(error) => Err(Error::io("write into", &self.path_of(""))(error)),
        }
    }

    /// The error for an operation that failed on this workspace.
    pub(super) fn refused(&self, operation: &str, why: &str) -> Error {
        Error::Invalid(format!("cannot {operation} `{}`: {why}", Visible(&self.path_of("").display())))
    }

    /// Turns the workspace into a whole checkpoint that lacks only its final name. `shards`, by file name and length,
    /// must exist and be durable. The manifest and the other `files`, by name and content, are written and made durable
    /// here. `meanwhile` runs while these bytes are being written out. A sync after it costs one flush less on a file
    /// system that flushes everything at once.
    pub fn seal(
        &mut self,
        shards: Vec<(String, u64)>,
        files: &[(&str, &[u8])],
        manifest: &[u8],
        meanwhile: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let own = self.own.as_ref().ok_or_else(|| self.refused("seal", "another process made it"))?;
        let (_, file) = &own.manifest;
        let path = self.path_of(manifest::FILE);
        if fs::fstat(file).map_err(Error::io("look at", &path))?.st_size > 0 {
            return Err(self.refused("seal", "it is sealed"));
        }
        self.check_files(&shards)?;
        let mut written = Vec::with_capacity(files.len());
        for (name, content) in files {
            let path = self.path_of(name);
            let file = Closing::from(create(self.directory(), name).map_err(Error::io("create", &path))?);
            fill(&file, &path, content)?;
            written.push((file, path));
        }
        fill(file, &path, manifest)?;
        meanwhile()?;
        for (file, path) in written.iter().map(|(file, path)| (file, path)).chain([(file, &path)]) {
            sync(file.as_fd()).map_err(Error::io("sync", path))?;
        }
        if let Some(own) = &mut self.own {
            let files = files.iter().map(|(name, content)| ((*name).to_owned(), content.len() as u64));
            own.sealed = Some(shards.into_iter().chain(files).collect());
        }
        Ok(())
    }

    /// Checks that all `files` exist with their lengths: a clean-up may have removed some of them from the workspace.
    pub(super) fn check_files(&self, files: &[(String, u64)]) -> Result<()> {
        for (file, bytes) in files {
            let path = self.path_of(file);
            let stat = stat(self.directory(), file).map_err(Error::io("find the finished file", &path))?;
            if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile
                || u64::try_from(stat.st_size) != Ok(*bytes)
            {
                let what = format!("it has {} bytes, expected {bytes}: something changed it", stat.st_size);
                return Err(Error::corrupt(&path, what));
            }
        }
        Ok(())
    }
}

impl Drop for Workspace {
    fn drop(&mut self) {
        // The manifest is closed first: NFS and FUSE rename an open file instead of removing it, so the directory would
        // stay.
        let Some(Own { process, .. }) = self.own.take() else { return };
        if process == std::process::id() {
            let _ = remove(self.parent.as_fd(), &self.temporary, self.id, None);
        }
    }
}

/// Opens a new workspace, denies access to everyone to whom `mode` denies it, and creates its manifest, empty and
/// locked.
fn furnish(
    parent: BorrowedFd<'_>,
    temporary: &OsStr,
    mode: Option<u32>,
) -> rustix::io::Result<(OwnedFd, Id, File)> {
    let directory = open_child(parent, temporary)?;
    if let Some(mode) = mode {
        // This fails if the file system has no modes.
        let _ = fs::fchmod(&directory, Mode::from_raw_mode(mode | OWNER));
    }
    let manifest = create(directory.as_fd(), manifest::FILE)?;
    match lock::take(&manifest) {
        // A sweep holds the lock.
        Err(error) if lock::is_taken(&error) => return Err(Errno::NOENT),
        // This fails if the file system has no locks. Nothing relies on locks there.
        _ => {}
    }
    // After a power cut, there must be no shards without a manifest, which marks them as a workspace.
    if !orders_names(directory.as_fd()) {
        retry_on_intr(|| fs::fsync(&manifest))?;
    }
    let id = id(&fs::fstat(&directory)?);
    // A network client trusts its own cache for a name that it has just created.
    refresh(parent);
    if id_of(parent, temporary) == Some(id) { Ok((directory, id, manifest)) } else { Err(Errno::NOENT) }
}

/// Removes a workspace that holds at most a manifest.
fn discard(parent: BorrowedFd<'_>, temporary: &OsStr) {
    if let Ok(directory) = open_child(parent, temporary) {
        let _ = fs::unlinkat(&directory, manifest::FILE, AtFlags::empty());
        let _ = fs::unlinkat(parent, temporary, AtFlags::REMOVEDIR);
    }
}

fn create(directory: BorrowedFd<'_>, name: &str) -> rustix::io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC | OFlags::NOFOLLOW;
    let fd = retry_on_intr(|| fs::openat(directory, name, flags, Mode::from_raw_mode(0o666)))?;
    Ok(File::from(fd))
}

fn fill(mut file: &File, path: &Path, bytes: &[u8]) -> Result<()> {
    let call = calls::on("write", file);
    file.write_all(bytes).map_err(Error::io("write", path))?;
    drop(call);
    start_write_back(file.as_fd(), 0, bytes.len() as u64);
    Ok(())
}
