//! Durability and visibility, which only this module handles: no other module renames, locks, removes or syncs a
//! directory of checkpoints.
//!
//! A checkpoint is built in a [`Workspace`], a directory with its own name beside the target path (`docs/format.md`,
//! 6). It is made durable from the inside out and then takes the final name in one step. The order is: shards (synced
//! by the save), index, manifest, the directory, the rename, the parent. Nothing changes under the final name before
//! the rename.
//!
//! The modules build on one another in this order: `locks`, `owner`, `names`, `directory`, `parents`, `content`;
//! `recovery`, `leftovers` and `unfinished`; `target`; `workspace`, `carry`, `takeover`; `incoming`; `gathering`, `single`;
//! and, for users, `clean`, `remove`, `list`.

mod carry;
mod clean;
mod content;
mod directory;
mod foreign;
mod gathering;
mod incoming;
mod leftovers;
mod list;
mod locks;
mod names;
mod owner;
mod parents;
mod recovery;
mod remove;
mod single;
mod takeover;
mod target;
mod unfinished;
mod workspace;

pub use self::clean::{Leftover, leftovers, remove_leftover};
pub(crate) use self::directory::refresh;
pub use self::gathering::Gathering;
pub use self::incoming::Incoming;
pub use self::leftovers::State;
pub use self::list::{Listed, list};
pub use self::locks::Reach;
pub(crate) use self::locks::{is_nfs, reach};
pub(crate) use self::parents::directory_at;
pub use self::recovery::open_checkpoint;
pub use self::remove::remove;
pub use self::single::SingleFile;
pub use self::takeover::{Displaced, Published};
pub use self::target::check;
pub use self::workspace::Workspace;

#[cfg(test)]
mod tests {
    use std::ffi::OsStr;
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::{Path, PathBuf};

    use super::leftovers::tests::{dead, half, name_by};
    use super::names::{aside_name, workspace_name};
    use super::*;
    use crate::error::{Error, Result};
    use crate::format::manifest;
    use crate::sys::file::DataFile;

    /// A workspace for `path`, sealed with a manifest that ends in `text`.
    pub(super) fn sealed(path: &Path, text: &str) -> Workspace {
        let mut workspace = Workspace::create(path, true).unwrap();
        seal(&mut workspace, &[], text).unwrap();
        workspace
    }

    pub(super) fn seal(workspace: &mut Workspace, shards: &[(&str, u64)], text: &str) -> Result<()> {
        let shards = shards.iter().map(|&(file, bytes)| (file.to_owned(), bytes)).collect();
        workspace.seal(shards, &[], format!("{{\"fastckpt\":1,{text}").as_bytes(), || Ok(()))
    }

    pub(super) fn checkpoint(parent: &Path, name: &str, text: &str) -> PathBuf {
        let path = parent.join(name);
        sealed(&path, text).publish().unwrap();
        path
    }

    pub(super) fn content(path: &Path) -> String {
        std::fs::read_to_string(path.join(manifest::FILE)).unwrap()
    }

    pub(super) fn names(path: &Path) -> Vec<String> {
        let mut all: Vec<_> =
            std::fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        all.sort();
        all
    }

    #[test]
    fn a_second_save_replaces_the_first_and_leaves_nothing() {
        let parent = tempfile::tempdir().unwrap();
        checkpoint(parent.path(), "c", "one");
        let path = checkpoint(parent.path(), "c", "two");
        assert!(content(&path).ends_with("two"));
        assert_eq!(names(parent.path()), ["c"]);
    }

    #[test]
    fn an_abandoned_save_leaves_the_old_one() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        drop(sealed(&path, "half"));
        assert!(content(&path).ends_with("one"));
        assert_eq!(names(parent.path()), ["c"]);
    }

    #[test]
    fn only_checkpoints_are_overwritten_and_only_when_allowed() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        let refused = |overwrite| matches!(Workspace::create(&path, overwrite), Err(Error::Exists { .. }));
        std::fs::create_dir(&path).unwrap();
        std::fs::write(path.join("model.safetensors"), "mine").unwrap();
        assert!(refused(true), "somebody's weights");
        std::fs::remove_dir_all(&path).unwrap();
        std::fs::write(&path, "mine").unwrap();
        assert!(refused(true), "a file");
        std::fs::remove_file(&path).unwrap();
        checkpoint(parent.path(), "real", "one");
        std::os::unix::fs::symlink("real", &path).unwrap();
        assert!(refused(true), "a link");
        std::fs::remove_file(&path).unwrap();
        checkpoint(parent.path(), "c", "one");
        assert!(refused(false), "overwrite=False");
        std::fs::create_dir(path.join("sub")).unwrap();
        assert!(refused(true), "a directory that holds a directory");
    }

    #[test]
    fn a_directory_that_loses_nothing_is_filled() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        std::fs::create_dir(&path).unwrap();
        drop(Workspace::create(&path, false).unwrap());
        checkpoint(parent.path(), "c", "one");
        std::fs::remove_file(path.join(manifest::FILE)).unwrap();
        std::fs::write(path.join("config.json"), "{}").unwrap();
        checkpoint(parent.path(), "c", "two");
        assert_eq!(names(&path), ["config.json", "fastckpt.json"]);
        assert_eq!(names(parent.path()), ["c"]);
    }

    const TRAINING: &str = "training/training.safetensors";

    fn with_training(path: &Path, text: &str) -> Result<()> {
        let mut workspace = Workspace::create(path, true)?;
        DataFile::create(workspace.directory(), TRAINING, 5, &mut || true).unwrap();
        seal(&mut workspace, &[(TRAINING, 5)], text)?;
        workspace.publish().map(drop)
    }

    #[test]
    fn shards_beside_the_model_come_and_go_with_their_checkpoint() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        for text in ["one", "two"] {
            with_training(&path, text).unwrap();
            assert!(content(&path).ends_with(text));
            assert_eq!(names(&path.join("training")), ["training.safetensors"]);
        }
        // A save also replaces directories without write permission.
        for directory in [path.join("training"), path.clone()] {
            std::fs::set_permissions(directory, std::fs::Permissions::from_mode(0o500)).unwrap();
        }
        checkpoint(parent.path(), "c", "three");
        assert_eq!(
            (names(&path), names(parent.path())),
            (vec![manifest::FILE.to_owned()], vec!["c".to_owned()])
        );
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
        with_training(&path, "four").unwrap();
        drop(sealed(&path, "half"));
        remove(&path, &[], false).unwrap();
        assert_eq!(names(parent.path()), [""; 0]);
        // A shard that is missing when the checkpoint is published is an error.
        let mut workspace = Workspace::create(&path, true).unwrap();
        assert!(seal(&mut workspace, &[(TRAINING, 5)], "").unwrap_err().to_string().contains(TRAINING));
    }

    #[test]
    fn what_others_put_beside_the_training_shards_stays() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        let refused = |why: &str| {
            let error = Workspace::create(&path, true).unwrap_err();
            assert!(matches!(&error, Error::Exists { .. }) && error.to_string().contains(why), "{error}");
        };
        with_training(&path, "one").unwrap();
        let notes = path.join("training/notes.txt");
        std::fs::write(&notes, "mine").unwrap();
        refused("`training/notes.txt`, which is not part");
        assert!(matches!(remove(&path, &[], false), Err(Error::Stays { .. })));
        assert_eq!(list(parent.path()).unwrap().len(), 1);
        std::fs::remove_file(&notes).unwrap();
        std::fs::create_dir(&notes).unwrap();
        refused("`training/notes.txt`, which is not a plain file");
        assert!(matches!(remove(&path, &[], true), Err(Error::Stays { .. })));
        std::fs::remove_dir(&notes).unwrap();
        std::fs::rename(path.join("training"), parent.path().join("elsewhere")).unwrap();
        std::os::unix::fs::symlink("../elsewhere", path.join("training")).unwrap();
        refused("`training`, which is not a plain file");
        std::fs::remove_file(path.join("training")).unwrap();
        std::fs::write(path.join("training"), "mine").unwrap();
        refused("a file `training`");
        std::fs::remove_file(path.join("training")).unwrap();
        std::fs::remove_file(path.join(manifest::FILE)).unwrap();
        std::fs::create_dir(path.join("training")).unwrap();
        refused("a directory `training` and is not a checkpoint");
        assert_eq!(names(&parent.path().join("elsewhere")), ["training.safetensors"]);
    }

    #[test]
    fn a_workspace_that_was_left_with_training_shards_is_swept() {
        let parent = tempfile::tempdir().unwrap();
        for shards in [&[][..], &["training.safetensors"]] {
            let left = half(parent.path().join(name_by("c", dead())));
            std::fs::create_dir(left.join("training")).unwrap();
            for shard in shards {
                std::fs::write(left.join("training").join(shard), "half").unwrap();
            }
            let sizes: Vec<_> = leftovers(parent.path()).unwrap().iter().map(|left| left.state).collect();
            assert_eq!(sizes, [State::Dead]);
            drop(Workspace::create(&parent.path().join("c"), true).unwrap());
            assert_eq!(names(parent.path()), [""; 0]);
        }
    }

    #[test]
    fn a_given_file_stays_until_another_save_gives_one_of_its_name() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        let save = |files: &[(&str, &[u8])]| {
            let mut workspace = Workspace::create(&path, true).unwrap();
            workspace.seal(Vec::new(), files, b"{\"fastckpt\":1,", || Ok(())).unwrap();
            workspace.publish().unwrap();
        };
        let text = |name: &str| std::fs::read_to_string(path.join(name)).unwrap();
        save(&[("config.json", b"1"), ("notes", b"")]);
        assert_eq!(names(&path), ["config.json", "fastckpt.json", "notes"]);
        save(&[]);
        assert_eq!((text("config.json"), text("notes")), ("1".to_owned(), String::new()));
        save(&[("config.json", b"22")]);
        assert_eq!((text("config.json"), text("notes")), ("22".to_owned(), String::new()));
        // A save does not take over a file that a rival published meanwhile under the name of one of its own files.
        let mut late = Workspace::create(&path, true).unwrap();
        late.seal(Vec::new(), &[("notes", b"late")], b"{\"fastckpt\":1,", || Ok(())).unwrap();
        save(&[("notes", b"rival"), ("config.json", b"333")]);
        assert!(late.publish().unwrap().rival);
        assert_eq!((text("config.json"), text("notes")), ("333".to_owned(), "late".to_owned()));
        // If a user removes such a file from the workspace, this is an error.
        let mut spoilt = Workspace::create(&path, true).unwrap();
        spoilt.seal(Vec::new(), &[("notes", b"4444")], b"{\"fastckpt\":1,", || Ok(())).unwrap();
        std::fs::remove_file(spoilt.path_of("notes")).unwrap();
        assert!(spoilt.publish().unwrap_err().to_string().contains("notes"));
        assert_eq!(text("notes"), "late");
    }

    #[test]
    fn a_replaced_checkpoint_passes_its_mode_on() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        for mode in [0o700, 0o500] {
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
            checkpoint(parent.path(), "c", "two");
            assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o7777, mode);
            assert_eq!(names(parent.path()), ["c"]);
        }
    }

    #[test]
    fn what_takes_the_name_during_a_save_is_told_of_or_left_alone() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        let begin = || sealed(&path, "late");
        let late = begin();
        checkpoint(parent.path(), "c", "rival");
        std::fs::write(path.join("config.json"), "{}").unwrap();
        assert!(late.publish().unwrap().rival);
        assert!(content(&path).ends_with("late"));
        assert_eq!(names(&path), ["config.json", "fastckpt.json"]);
        let late = begin();
        assert!(!late.publish().unwrap().rival);
        let late = begin();
        std::fs::remove_dir_all(&path).unwrap();
        std::fs::create_dir_all(path.join("my experiments")).unwrap();
        assert!(matches!(late.publish(), Err(Error::Exists { .. })));
        assert_eq!(names(&path), ["my experiments"]);
        assert_eq!(names(parent.path()), ["c"]);
    }

    #[test]
    fn long_names_have_temporary_names_too() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), &"n".repeat(255), "one");
        assert!(content(&path).ends_with("one"));
    }

    #[test]
    fn modes_follow_the_umask() {
        let parent = tempfile::tempdir().unwrap();
        let path = checkpoint(parent.path(), "c", "one");
        let probe = parent.path().join("probe");
        std::fs::write(&probe, "").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&path.join(manifest::FILE)), mode(&probe));
    }

    #[test]
    fn a_save_makes_missing_parents_and_a_check_makes_none() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("a/b/c");
        check(&path, false).unwrap();
        assert_eq!(names(root.path()), [""; 0]);
        let long = check(&root.path().join("a").join("x".repeat(300)), false).unwrap_err();
        assert_eq!(long.errno(), Some(libc::ENAMETOOLONG));
        let workspace = Workspace::create(&path, false).unwrap();
        drop(Workspace::join(&path, workspace.temporary()).unwrap());
        drop(workspace);
        assert_eq!(names(&root.path().join("a/b")), [""; 0]);
        let error = Workspace::join(&root.path().join("d/c"), OsStr::new("c")).unwrap_err();
        assert_eq!(error.errno(), Some(libc::ENOENT), "joining a save creates nothing: {error}");
    }

    #[test]
    fn what_is_not_a_workspace_of_the_target_is_not_joined() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("c");
        let workspace = Workspace::create(&path, true).unwrap();
        let refused = |name: &OsStr, why: &str| {
            let error = Workspace::join(&path, name).unwrap_err();
            assert!(error.to_string().contains(why), "{error}");
        };
        let other = Workspace::create(&parent.path().join("other"), true).unwrap();
        for name in
            [other.temporary(), OsStr::new("c"), OsStr::new("../c"), &aside_name(workspace.temporary(), 0)]
        {
            refused(name, "not the name of a workspace");
        }
        let [bare, gone] = [(); 2].map(|()| workspace_name(OsStr::new("c")));
        std::fs::create_dir(parent.path().join(&bare)).unwrap();
        refused(&bare, "it is not a workspace");
        refused(&gone, "No such file");
        // The state in which an exchange of names leaves an old checkpoint.
        std::fs::write(parent.path().join(&bare).join(manifest::FILE), "{\"fastckpt\":1,").unwrap();
        refused(&bare, "it is sealed");
        drop(Workspace::join(&path, workspace.temporary()).unwrap());
        assert!(workspace.path_of(manifest::FILE).exists());
    }
}
