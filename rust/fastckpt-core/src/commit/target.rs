//! The directory at the target path, and whether a save may replace it.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::io::Errno;

use super::content::{TORCH_METADATA, files, has_magic, in_training, is_ours, is_remnant};
use super::directory::{Id, TURNS, id, id_of, open_child, refresh, split};
use super::foreign::writer_of;
use super::parents::{check_length, open_or_judge};
use super::recovery::{Free, is_free, taken_aside};
use crate::error::{Error, Result};
use crate::format::groups::TRAINING;
use crate::sys::fs::{self, AtFlags, FileType, Stat, StatxAttributes, StatxFlags};

/// A directory that a save may replace.
#[derive(Debug)]
pub(super) struct Old {
    /// The final name, or the name under which a killed commit moved the directory aside.
    pub(super) name: OsString,
    /// Kept open: until it is closed, no other directory gets its inode number.
    pub(super) directory: OwnedFd,
    pub(super) id: Id,
    pub(super) mode: u32,
}

/// The parent of the target path, and the final name.
pub(super) fn split_target(target: &Path) -> Result<(PathBuf, OsString)> {
    split(target).ok_or_else(|| Error::Exists {
        path: target.to_path_buf(),
        why: "the path must end in the checkpoint's name".to_owned(),
    })
}

/// Checks whether a save to `target` would be refused now, because something has the name and must not be replaced, or
/// because no directory can be created there. Changes nothing.
pub fn check(target: &Path, overwrite: bool) -> Result<()> {
    let (parent, name) = split_target(target)?;
    match open_or_judge(&parent)? {
        (parent, true) => look_at_name(parent.as_fd(), &name, target, overwrite).map(drop),
        (above, false) => check_length(&above, &name).map_err(Error::io("look at", target)),
    }
}

/// Looks up `name`. Returns the directory that a save may replace, or `None` if the name is free. Fails otherwise.
pub(super) fn look(
    parent: BorrowedFd<'_>,
    name: &OsStr,
    target: &Path,
    overwrite: bool,
) -> Result<Option<Old>> {
    // A checkpoint that was moved aside is current until another one has the name. It may be taken over without a proof
    // that its writer is dead: the process that renames first gets the name, and the other process looks again.
    let mut turn = 0;
    while is_free(parent, name) {
        match taken_aside(parent, name) {
            Free::Taken => {}
            Free::Truly => break,
            Free::For(aside) => {
                let found = look_at_name(parent, &aside.name, target, overwrite);
                let gone = found.as_ref().map_or_else(is_gone, Option::is_none);
                if !gone || turn == TURNS {
                    return found;
                }
                // The writer, on another machine, has removed it meanwhile.
                refresh(parent);
                turn += 1;
            }
        }
    }
    look_at_name(parent, name, target, overwrite)
}

/// Whether the error shows that the examined directory is gone because its successor has the name.
pub(super) fn is_gone(error: &Error) -> bool {
    matches!(error.errno(), Some(libc::ENOENT | libc::ESTALE))
}

/// Like [`look`], but only for the directory called `name` itself.
pub(super) fn look_at_name(
    parent: BorrowedFd<'_>,
    name: &OsStr,
    target: &Path,
    overwrite: bool,
) -> Result<Option<Old>> {
    let mut turn = 0;
    loop {
        let before = id_of(parent, name);
        let outcome = look_once(parent, name, target, overwrite);
        // The directory may have been replaced and emptied meanwhile. In that case, the outcome proves nothing.
        if outcome.is_ok() || turn == TURNS {
            return outcome;
        }
        refresh(parent);
        if id_of(parent, name) == before
            && !outcome.as_ref().is_err_and(|error| error.errno() == Some(libc::ESTALE))
        {
            return outcome;
        }
        turn += 1;
    }
}

fn look_once(parent: BorrowedFd<'_>, name: &OsStr, target: &Path, overwrite: bool) -> Result<Option<Old>> {
    let exists = |why: &str| Error::Exists { path: target.to_path_buf(), why: why.to_owned() };
    let stat = match fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(None),
        other => other.map_err(Error::io("look at", target))?,
    };
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory if is_mount_point(parent, name, &stat) => {
            return Err(exists(
                "it is a mount point, which a rename cannot replace: save to a path below it",
            ));
        }
        FileType::Directory => {}
        _ if !overwrite => return Err(exists("it exists, and overwrite=False")),
        FileType::Symlink => return Err(exists("it is a symbolic link: save to the path it points to")),
        _ => return Err(exists("it is a file, not a checkpoint: choose another name")),
    }
    open_old(parent, name, target, overwrite)
}

/// Whether a file system is mounted at `name`. A rename cannot replace a mount point, whose content is on another file
/// system than its siblings.
fn is_mount_point(parent: BorrowedFd<'_>, name: &OsStr, stat: &Stat) -> bool {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
    match fs::statx(parent, name, flags, StatxFlags::empty()) {
        Ok(about) if about.stx_attributes_mask.contains(StatxAttributes::MOUNT_ROOT) => {
            about.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)
        }
        // Linux before 5.8 does not report mount points, and a sandbox may refuse the call. This also refuses a
        // subvolume of btrfs.
        _ => fs::fstat(parent).is_ok_and(|parent| parent.st_dev != stat.st_dev),
    }
}

fn open_old(parent: BorrowedFd<'_>, name: &OsStr, target: &Path, overwrite: bool) -> Result<Option<Old>> {
    let directory = match open_child(parent, name) {
        Err(Errno::NOENT) => return Ok(None),
        other => other.map_err(Error::io("open", target))?,
    };
    let stat = fs::fstat(&directory).map_err(Error::io("look at", target))?;
    examine(directory.as_fd(), target, overwrite)?;
    Ok(Some(Old { name: name.to_owned(), id: id(&stat), mode: stat.st_mode & 0o7777, directory }))
}

/// Whether `directory` may be replaced: it is a checkpoint, or a directory that holds nothing that would be lost.
pub(super) fn examine(directory: BorrowedFd<'_>, target: &Path, overwrite: bool) -> Result<()> {
    let exists = |why: &str| Err(Error::Exists { path: target.to_path_buf(), why: why.to_owned() });
    let checkpoint = has_magic(directory).map_err(Error::io("open the manifest of", target))?;
    let files = files(directory).map_err(Error::io("list", target))?;
    if !overwrite && !files.is_empty() {
        return exists("it exists, and overwrite=False");
    }
    if !checkpoint && files.training.is_some() {
        return exists(
            "it holds a directory `training` and is not a checkpoint of fastckpt: choose another name",
        );
    }
    // This comes first, because it describes best what is there. A file of ours that is damaged has such a name, too.
    for (file, _) in &files.all {
        let name = file.to_bytes();
        let own = is_ours(name) && name != TORCH_METADATA.as_bytes();
        // Beside a checkpoint, only files that torch.distributed.checkpoint still finds count: others are carried over.
        let counts =
            if checkpoint { name.ends_with(b".distcp") } else { in_training(file).is_none() && !own };
        if let Some(writer) = writer_of(name).filter(|_| counts) {
            let what = file.to_string_lossy();
            return exists(&format!("it holds `{what}`, which {writer} wrote: choose another name"));
        }
    }
    for (file, kind) in files.all {
        let what = file.to_string_lossy();
        if kind != FileType::RegularFile {
            return exists(&format!(
                "it holds `{what}`, which is not a plain file: move that elsewhere first"
            ));
        }
        let name = file.to_bytes();
        if name == TRAINING.as_bytes() {
            return exists(&format!(
                "it holds a file `{what}`, but a checkpoint has a directory of that name: rename the file"
            ));
        }
        // Nothing is carried over from the directory `training`.
        if in_training(&file).is_some() && !is_ours(name) && !is_remnant(&file) {
            return exists(&format!(
                "it holds `{what}`, which is not part of the checkpoint: move that elsewhere first"
            ));
        }
        // Other files are carried over. A file with a name that fastckpt uses would be replaced.
        if !checkpoint && is_ours(name) {
            return exists(&format!(
                "it holds `{what}` and is not a checkpoint of fastckpt: choose another name"
            ));
        }
    }
    Ok(())
}
