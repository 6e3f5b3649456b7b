//! Removes a checkpoint. Its name never refers to half of it.

use std::ffi::{CStr, OsStr};
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use rustix::io::Errno;

use super::content::{Files, files, has_magic, is_remnant};
use super::directory::{TURNS, id, id_of, open_child, refresh, split, sync};
use super::leftovers::{claim, destroy, sweep, unclaim};
use super::names::{Kind, Temporary, workspace_name};
use super::recovery::{Free, is_free, taken_aside};
use crate::error::{Error, Result};
use crate::sys::file::open_directory;
use crate::sys::fs::{self, FileType};

/// Whether the directory that holds these files must stay because of the given file.
type StaysWith<'a> = &'a dyn Fn(&Files, &CStr) -> bool;

/// Durably removes the checkpoint at `path`, and its leftovers under other names from killed saves. It does not wait
/// for readers: a process that is reading the checkpoint finds its files missing.
///
/// Files that are not part of the checkpoint are an error, except plain files that `more` names, or all plain files
/// with `force`: these are removed, too.
pub fn remove(path: &Path, more: &[String], force: bool) -> Result<()> {
    let stays_with = |files: &Files, file: &CStr| {
        let listed = || more.iter().any(|one| one.as_bytes() == file.to_bytes());
        !force && !files.has_own(file) && !is_remnant(file) && !listed()
    };
    let missing = || Error::io("remove", path)(io::Error::from_raw_os_error(libc::ENOENT));
    let (parent_path, name) =
        split(path).ok_or_else(|| stays(path, "the path must end in the checkpoint's name"))?;
    let parent = open_directory(&parent_path).map_err(Error::io("remove", path))?;
    let parent = parent.as_fd();
    // Sweeps first: an old checkpoint whose successor has the name would otherwise stay for good after the successor is
    // removed.
    sweep(parent);
    let mut removed = false;
    for _ in 0..TURNS {
        if !is_free(parent, &name) {
            if removed {
                break; // this is the checkpoint of a later save
            }
            removed = take(parent, &name, path, &stays_with)?;
            continue;
        }
        match taken_aside(parent, &name) {
            Free::Taken => {}
            Free::Truly if removed => break,
            Free::Truly if id_of(parent, &name).is_some() => {
                return Err(stays(path, "it is an empty directory"));
            }
            Free::Truly => return Err(missing()),
            // A load would find this checkpoint and put it back.
            Free::For(aside) => removed |= take(parent, &aside.name, path, &stays_with)?,
        }
    }
    if removed { Ok(()) } else { Err(missing()) }
}

/// Removes the checkpoint at `found`. Returns whether it existed.
fn take(parent: BorrowedFd<'_>, found: &OsStr, path: &Path, stays_with: StaysWith<'_>) -> Result<bool> {
    let directory = match open_child(parent, found) {
        Err(Errno::NOENT | Errno::STALE) => return Ok(false),
        Err(Errno::LOOP | Errno::NOTDIR) => {
            return Err(stays(
                path,
                "it is a file or a symbolic link: remove what that points to, or the link itself",
            ));
        }
        other => other.map_err(Error::io("remove", path))?,
    };
    let expected = id(&fs::fstat(&directory).map_err(Error::io("remove", path))?);
    examine(directory.as_fd(), path, stays_with)?;
    let claimed = workspace_name(path.file_name().unwrap_or(found));
    if !claim(parent, found, &claimed, expected).map_err(Error::io("remove", path))? {
        refresh(parent);
        return Ok(false);
    }
    // Another process may have added something to the directory meanwhile.
    if let Err(refusal) = examine(directory.as_fd(), path, stays_with) {
        unclaim(parent, found, &claimed).map_err(Error::io("restore the name of", path))?;
        return Err(refusal);
    }
    let Some(garbage) = Temporary::parse(claimed.as_encoded_bytes()).map(|t| t.renamed(Kind::Del)) else {
        return Ok(false);
    };
    fs::renameat(parent, &claimed, parent, &garbage).map_err(Error::io("remove", path))?;
    sync(parent).map_err(Error::io("sync the parent directory of", path))?;
    match destroy(parent, &garbage, expected) {
        // A process has one of the files open, on a file system that keeps such files under hidden names. A later save
        // sweeps the rest.
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTEMPTY | libc::EBUSY)) => Ok(true),
        other => other.map(|()| true).map_err(Error::io("remove the files of", path)),
    }
}

fn stays(path: &Path, why: &str) -> Error {
    Error::Stays { path: path.to_path_buf(), why: why.to_owned() }
}

/// Refuses a directory that is not a checkpoint, that holds anything but plain files, or that must stay (`stays_with`).
fn examine(directory: BorrowedFd<'_>, path: &Path, stays_with: StaysWith<'_>) -> Result<()> {
    if !has_magic(directory).map_err(Error::io("open the manifest of", path))? {
        return Err(stays(path, "it is not a checkpoint of fastckpt"));
    }
    let found = files(directory).map_err(Error::io("list", path))?;
    for (file, kind) in &found.all {
        let what = file.to_string_lossy();
        if *kind != FileType::RegularFile {
            return Err(stays(
                path,
                &format!("it holds `{what}`, which is not a plain file: move that elsewhere first"),
            ));
        }
        if stays_with(&found, file) {
            let why = format!(
                "it holds `{what}`, which is not part of the checkpoint: move that elsewhere, or give force=True"
            );
            return Err(stays(path, &why));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use crate::commit::leftovers::tests::{dead, half, name_by};
    use crate::commit::names::aside_name;
    use crate::commit::tests::{checkpoint, names};
    use crate::commit::{Workspace, list, open_checkpoint};
    use crate::format::manifest;

    use super::*;

    /// A checkpoint `c` with a shard, in a new directory.
    fn made() -> (tempfile::TempDir, PathBuf) {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        std::fs::write(path.join("model.safetensors"), "shard").unwrap();
        (parent, path)
    }

    fn refusal(path: &Path, force: bool) -> String {
        let error = remove(path, &[], force).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOTEMPTY), "{error}");
        error.to_string()
    }

    #[test]
    fn a_checkpoint_is_removed_and_nothing_else() {
        let (parent, path) = made();
        checkpoint(parent.path(), "d", "other");
        remove(&path, &[], false).unwrap();
        assert_eq!(names(parent.path()), ["d"]);
        let error = remove(&path, &[], true).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOENT), "{error}");
    }

    #[test]
    fn files_of_others_keep_it() {
        let (parent, path) = made();
        std::fs::write(path.join("config.json"), "{}").unwrap();
        assert!(refusal(&path, false).contains("`config.json`"));
        std::fs::create_dir(path.join("logs")).unwrap();
        assert!(refusal(&path, true).contains("`logs`"));
        std::fs::remove_dir(path.join("logs")).unwrap();
        std::os::unix::fs::symlink("/", path.join("link")).unwrap();
        assert!(refusal(&path, true).contains("`link`"));
        std::fs::remove_file(path.join("link")).unwrap();
        assert_eq!(names(&path), ["config.json", "fastckpt.json", "model.safetensors"]);
        assert_eq!(names(parent.path()), ["c"]);
        remove(&path, &[], true).unwrap();
        assert_eq!(names(parent.path()), [""; 0]);
    }

    #[test]
    fn files_that_are_named_go_with_it() {
        let (parent, path) = made();
        for name in ["config.json", "notes.txt"] {
            std::fs::write(path.join(name), "{}").unwrap();
        }
        std::fs::write(parent.path().join("outside"), "mine").unwrap();
        let more = ["config.json".to_owned(), "../outside".to_owned()];
        let error = remove(&path, &more, false).unwrap_err();
        assert!(error.to_string().contains("`notes.txt`"), "{error}");
        assert_eq!(names(&path), ["config.json", "fastckpt.json", "model.safetensors", "notes.txt"]);
        std::fs::remove_file(path.join("notes.txt")).unwrap();
        remove(&path, &more, false).unwrap();
        assert_eq!(names(parent.path()), ["outside"]);
    }

    #[test]
    fn what_is_not_a_checkpoint_stays() {
        let (parent, path) = made();
        let at = |name: &str| parent.path().join(name);
        std::os::unix::fs::symlink("c", at("link")).unwrap();
        std::fs::write(at("file"), "mine").unwrap();
        std::fs::create_dir(at("empty")).unwrap();
        std::fs::create_dir(at("weights")).unwrap();
        std::fs::write(at("weights").join("model.safetensors"), "mine").unwrap();
        for (name, why) in [
            ("link", "a symbolic link"),
            ("file", "a file"),
            ("empty", "an empty directory"),
            ("weights", "not a checkpoint"),
        ] {
            assert!(refusal(&at(name), true).contains(why), "{name}");
        }
        assert!(refusal(Path::new("/"), true).contains("checkpoint's name"));
        assert_eq!(names(parent.path()), ["c", "empty", "file", "link", "weights"]);
        assert!(path.exists());
    }

    #[test]
    fn what_was_taken_aside_does_not_come_back() {
        for has_the_name in [false, true] {
            let (parent, path) = made();
            // Two saves were killed one after the other, each between its two renames.
            for text in ["two", "three"] {
                let temporary = name_by("c", dead());
                let aside = parent.path().join(aside_name(&temporary, 0));
                std::fs::rename(checkpoint(parent.path(), text, text), aside).unwrap();
                half(parent.path().join(&temporary));
            }
            if !has_the_name {
                std::fs::remove_dir_all(&path).unwrap();
            }
            remove(&path, &[], false).unwrap();
            assert!(open_checkpoint(&path).is_err(), "has_the_name={has_the_name}");
            // The writers of these workspaces are dead.
            drop(Workspace::create(&parent.path().join("d"), true).unwrap());
            assert_eq!(names(parent.path()), [""; 0], "has_the_name={has_the_name}");
        }
    }

    #[test]
    fn a_removal_that_was_killed_leaves_no_checkpoint_and_is_swept() {
        let (parent, path) = made();
        // Killed after its first rename, after its second, and after the manifest was removed.
        for (kind, has_manifest) in [(Kind::Tmp, true), (Kind::Del, true), (Kind::Del, false)] {
            let claimed = name_by("c", dead());
            let name = if kind == Kind::Tmp {
                claimed
            } else {
                claimed.into_string().unwrap().replace(".tmp-", ".del-").into()
            };
            let left = parent.path().join(name);
            std::fs::rename(&path, &left).unwrap();
            if !has_manifest {
                std::fs::remove_file(left.join(manifest::FILE)).unwrap();
            }
            assert!(open_checkpoint(&path).is_err());
            assert_eq!(list(parent.path()).unwrap().len(), 0);
            checkpoint(parent.path(), "c", "two");
            assert_eq!(names(parent.path()), ["c"]);
        }
    }

    #[test]
    fn what_took_the_name_since_it_was_looked_at_is_given_back() {
        let (parent, path) = made();
        let directory = open_directory(parent.path()).unwrap();
        let parent_fd = directory.as_fd();
        let before = id_of(parent_fd, OsStr::new("c")).unwrap();
        std::fs::rename(&path, parent.path().join("elsewhere")).unwrap();
        checkpoint(parent.path(), "c", "two");
        let claimed = workspace_name(OsStr::new("c"));
        assert!(!claim(parent_fd, OsStr::new("c"), &claimed, before).unwrap());
        assert_eq!(names(parent.path()), ["c", "elsewhere"]);
        // If the name is taken, the directory stays under a name that no sweep removes.
        std::fs::rename(&path, parent.path().join(&claimed)).unwrap();
        std::fs::rename(parent.path().join("elsewhere"), &path).unwrap();
        assert!(unclaim(parent_fd, OsStr::new("c"), &claimed).is_err());
        drop(Workspace::create(&path, true).unwrap());
        let kept = names(parent.path());
        assert!(kept.len() == 2 && kept[0].ends_with(".displaced"), "{kept:?}");
    }
}
