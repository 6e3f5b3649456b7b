//! Shows users the entries under temporary names in a directory of checkpoints, and removes them on request.

use std::ffi::{CString, OsStr, OsString};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use super::content::files;
use super::directory::{open_child, sync};
use super::leftovers::{Finding, State, examine, remove, temporaries};
use super::names::{Temporary, parse_gathering};
use super::unfinished::{Judged, judge, throw_away, unfinished};
use crate::error::{Error, Result};
use crate::sys::file::open_directory;
use crate::sys::fs::{self, AtFlags, FileType, Stat};

/// A directory under a temporary name in a directory of checkpoints.
#[derive(Debug)]
pub struct Leftover {
    /// The name of the directory.
    pub name: OsString,
    /// The checkpoint that the directory belongs to.
    pub of: String,
    /// The host on which it was created. Empty for an unfinished copy, which several hosts may share.
    pub host: String,
    /// The state of the directory.
    pub state: State,
    /// The space that its files take, in bytes.
    pub bytes: u64,
    /// Seconds since 1970 when it last changed: something was created, removed or renamed in it, or written to a file.
    pub changed: i64,
}

/// Lists the entries of `directory` under temporary names.
pub fn leftovers(directory: &Path) -> Result<Vec<Leftover>> {
    let parent = open_directory(directory).map_err(Error::io("open", directory))?;
    let parent = parent.as_fd();
    let failed = |error| Error::io("list", directory)(error);
    let mut found = Vec::new();
    for name in temporaries(parent).map_err(failed)? {
        let Some(temporary) = Temporary::parse(name.as_bytes()) else { continue };
        let Some((bytes, changed)) = measure(parent, &name) else { continue };
        let Some(Finding { state, .. }) = examine(parent, &name) else { continue };
        let (of, host) = (temporary.of().to_string_lossy().into_owned(), temporary.host());
        found.push(Leftover { name, of, host, state, bytes, changed });
    }
    for name in unfinished(parent).map_err(failed)? {
        let Some((of, _)) = parse_gathering(&name) else { continue };
        let Some((bytes, changed)) = measure(parent, &name) else { continue };
        let Some(Judged { state, .. }) = judge(parent, &name) else { continue };
        let (of, host) = (of.to_string_lossy().into_owned(), String::new());
        found.push(Leftover { name, of, host, state, bytes, changed });
    }
    Ok(found)
}

/// The space that the files of the directory `name` take, and the time of their last change; `None` if it is gone.
fn measure(parent: BorrowedFd<'_>, name: &OsStr) -> Option<(u64, i64)> {
    let inside = open_child(parent, name).ok()?;
    let mut stats = vec![fs::fstat(&inside).ok()?];
    if let Ok(files) = files(inside.as_fd()) {
        stats.extend(files.training.and_then(|training| fs::fstat(training).ok()));
        let stat = |file: &CString| fs::statat(&inside, file, AtFlags::SYMLINK_NOFOLLOW).ok();
        stats.extend(files.all.iter().filter_map(|(file, _)| stat(file)));
    }
    let is_file = |stat: &&Stat| FileType::from_raw_mode(stat.st_mode) != FileType::Directory;
    let blocks = stats.iter().filter(is_file).filter_map(|stat| u64::try_from(stat.st_blocks).ok());
    Some((blocks.map(|blocks| blocks * 512).sum(), stats.iter().map(|stat| stat.st_ctime).max()?))
}

/// Removes one of [`leftovers`]. With `force`, also removes one whose writer is not provably dead, and an old
/// checkpoint that is kept, but never one whose writer is alive. Returns whether it was removed.
pub fn remove_leftover(directory: &Path, name: &OsStr, force: bool) -> Result<bool> {
    let parent = open_directory(directory).map_err(Error::io("open", directory))?;
    let may_go = |state| match state {
        State::Dead => true,
        State::Unknown | State::Kept => force,
        State::Alive | State::Foreign => false,
    };
    let failed = |error| Error::io("remove", &directory.join(name))(error);
    if parse_gathering(name).is_some() {
        let Some(judged) = judge(parent.as_fd(), name).filter(|judged| may_go(judged.state)) else {
            return Ok(false);
        };
        throw_away(parent.as_fd(), name, judged.id).map_err(failed)?;
        return Ok(true);
    }
    let Some(finding) = examine(parent.as_fd(), name).filter(|finding| may_go(finding.state)) else {
        return Ok(false);
    };
    sync(parent.as_fd()).map_err(Error::io("sync the directory", directory))?;
    remove(parent.as_fd(), name, finding.id, finding.verdict).map_err(failed)?;
    Ok(true)
}

#[cfg(test)]
mod tests {
    use crate::commit::leftovers::tests::{dead, half, living, lock, name_by};

    use super::*;

    #[test]
    fn what_is_written_to_a_file_counts_as_a_change() {
        let parent = tempfile::tempdir().unwrap();
        let path = half(parent.path().join(".step-1.tmp-node7-0000000000000001-1-1-1-00000001"));
        std::fs::create_dir(path.join("training")).unwrap();
        let (model, training) = (path.join("model.safetensors"), path.join("training/training.safetensors"));
        for file in [&model, &training] {
            std::fs::write(file, "some").unwrap();
        }
        let changed = |path: &Path| fs::stat(path).unwrap().st_ctime;
        let all = || leftovers(parent.path()).unwrap().remove(0).changed;
        for file in [model, training] {
            let before = all();
            // Waits until the clock shows another second.
            while changed(&file) <= before {
                std::fs::write(&file, "more").unwrap();
            }
            assert!(changed(&path) <= before && all() == changed(&file));
        }
    }

    #[test]
    fn leftovers_are_listed_and_removed_on_request() {
        let parent = tempfile::tempdir().unwrap();
        let mut other = living();
        let alive = half(parent.path().join(name_by("c", other.id())));
        let _held = lock(&alive);
        let gone = half(parent.path().join(name_by("c", dead())));
        let unknown = half(parent.path().join(".step-1.tmp-node7-0000000000000001-1-1-1-00000001"));
        let all = leftovers(parent.path()).unwrap();
        let state =
            |path: &Path| all.iter().find(|one| Some(one.name.as_os_str()) == path.file_name()).unwrap();
        assert_eq!(state(&alive).state, State::Alive);
        assert_eq!(state(&gone).state, State::Dead);
        assert_eq!((state(&unknown).state, state(&unknown).of.as_str()), (State::Unknown, "step-1"));
        assert_eq!((state(&unknown).host.as_str(), state(&unknown).bytes > 0), ("node7", true));
        let remove =
            |path: &Path, force| remove_leftover(parent.path(), path.file_name().unwrap(), force).unwrap();
        assert!(!remove(&alive, true) && !remove(&unknown, false) && !remove(Path::new("/c"), true));
        assert!(remove(&unknown, true) && remove(&gone, false));
        assert!(alive.exists() && !unknown.exists() && !gone.exists());
        other.kill().unwrap();
        other.wait().unwrap();
    }
}
