//! The only error type: the operation, the path, the cause, and what to do.

use std::fmt::{self, Write};
use std::path::{Path, PathBuf};

/// Shorthand for results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// Everything that can go wrong.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The operating system refused or failed an operation.
    #[error("cannot {operation} `{}`: {}{}", Visible(&path.display()), cause(source), hint(operation, source))]
    Io {
        /// The operation, as a verb phrase.
        operation: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A file of a checkpoint differs from what was written.
    #[error("corrupt checkpoint: `{}`: {}", Visible(&path.display()), Visible(what))]
    Corrupt {
        /// The damaged file.
        path: PathBuf,
        /// What is wrong with the file.
        what: String,
    },
    /// The directory at the path was not written by fastckpt.
    #[error("`{}` is not a checkpoint of fastckpt: {}", Visible(&path.display()), Visible(why))]
    Foreign {
        /// The path that the caller passed.
        path: PathBuf,
        /// Why it is not a checkpoint.
        why: String,
    },
    /// The checkpoint was replaced or removed while it was read.
    #[error("`{}` was replaced or removed while it was read: open it again", path.display())]
    Replaced {
        /// The path of the checkpoint.
        path: PathBuf,
    },
    /// This release cannot read checkpoints of the format version that the manifest names.
    #[error("`{}` {why}", Visible(&path.display()))]
    Version {
        /// The path of the manifest.
        path: PathBuf,
        /// The reason, and what to do.
        why: String,
    },
    /// The target path exists and must not be replaced.
    #[error("cannot save to `{}`: {why}", Visible(&path.display()))]
    Exists {
        /// The target path.
        path: PathBuf,
        /// Why it must not be replaced.
        why: String,
    },
    /// An object of the core was used in a state that does not allow it.
    #[error("{0}")]
    Misused(&'static str),
    /// The path must not be removed.
    #[error("cannot remove `{}`: {why}", Visible(&path.display()))]
    Stays {
        /// The path that the caller passed.
        path: PathBuf,
        /// Why it must not be removed.
        why: String,
    },
    /// The storage does not respond.
    #[error("{}", hangs(operation, path, *.seconds, *.end))]
    Hangs {
        /// The operation that does not end, as a verb phrase.
        operation: &'static str,
        /// The file or directory on which the operation hangs.
        path: PathBuf,
        /// For how many seconds the operation has not ended.
        seconds: f64,
        /// The consequence for the save.
        end: Given,
    },
    /// The tensors or options do not form a valid checkpoint.
    #[error("{0}")]
    Invalid(String),
    /// The state exceeds the limits of the format; nothing was written.
    #[error("this state is too large for one checkpoint: {0}")]
    TooLarge(String),
    /// A callback of the caller, run by a worker, failed.
    #[error("copying a tensor failed: {0}")]
    Callback(String),
    /// Another rank, or another part of this rank, failed. The mail of this rank was stopped.
    #[error("the exchange with other ranks was stopped: {0}")]
    Stopped(String),
    /// Bytes of another rank differ from what that rank sent.
    #[error("{0}")]
    Altered(String),
    /// The caller asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// A worker panicked. This is a bug in fastckpt. No checkpoint became visible.
    #[error("a worker thread panicked, please report this bug: {0}")]
    Panic(String),
}

/// What has become of a save whose storage does not respond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Given {
    /// The save was given up, and no part of it gets the checkpoint's name.
    Up,
    /// The save was given up while the checkpoint was getting its name.
    UpAtTheEnd,
    /// The save has not begun, because an earlier one was given up.
    NotBegun,
}

impl Error {
    /// Returns a closure that wraps a system error, to be passed to `map_err`.
    pub fn io<E: Into<std::io::Error>>(operation: &'static str, path: &Path) -> impl FnOnce(E) -> Self {
        let path = path.to_path_buf();
        move |source| Self::Io { operation, path, source: source.into() }
    }

    /// The error of a failed transfer. With `strict`, only direct I/O is allowed, so `EINVAL` is its refusal.
    #[must_use]
    pub fn transfer(operation: &'static str, path: &Path, error: std::io::Error, strict: bool) -> Self {
        let refused = strict && error.raw_os_error() == Some(libc::EINVAL);
        Self::io(if refused { DIRECT } else { operation }, path)(error)
    }

    /// The error if direct I/O was required and `path` does not support it.
    #[must_use]
    pub fn no_direct(path: &Path) -> Self {
        Self::io(DIRECT, path)(std::io::Error::from_raw_os_error(libc::EINVAL))
    }

    /// The errno of this error, if it has one.
    #[must_use]
    pub fn errno(&self) -> Option<i32> {
        match self {
            Self::Io { source, .. } => source.raw_os_error(),
            Self::Exists { .. } => Some(libc::EEXIST),
            Self::Stays { .. } => Some(libc::ENOTEMPTY),
            Self::Replaced { .. } => Some(libc::ENOENT),
            Self::Hangs { .. } => Some(libc::ETIMEDOUT),
            _ => None,
        }
    }

    /// Whether the process or the machine has reached its limit of open files.
    #[must_use]
    pub fn wants_descriptors(&self) -> bool {
        matches!(self.errno(), Some(libc::EMFILE | libc::ENFILE))
    }

    /// A [`Error::Corrupt`] about `path`.
    pub fn corrupt(path: &Path, what: impl Into<String>) -> Self {
        Self::Corrupt { path: path.to_path_buf(), what: what.into() }
    }
}

/// Text that may come from a file, made safe for a terminal: characters that could move its cursor or reverse its
/// direction are escaped.
pub(crate) struct Visible<'a, T: fmt::Display + ?Sized>(pub(crate) &'a T);

impl<T: fmt::Display + ?Sized> fmt::Display for Visible<'_, T> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(Escaping(out), "{}", self.0)
    }
}

struct Escaping<'a, 'b>(&'a mut fmt::Formatter<'b>);

impl Write for Escaping<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for char in text.chars() {
            // Direction marks, line separators and joiners. The standard library has no wider class for them.
            let unseen = matches!(char, '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}');
            if unseen || char.is_control() {
                write!(self.0, "{}", char.escape_default())?;
            } else {
                self.0.write_char(char)?;
            }
        }
        Ok(())
    }
}

/// The operation whose failure means that the parent of the target path does not exist and cannot be created.
pub(crate) const OPEN_PARENT: &str = "open the parent directory";

/// The operation whose failure means that direct I/O was required and is not available.
const DIRECT: &str = "use direct I/O on";

/// The operation whose failure means that direct I/O was required for an object store.
pub(crate) const DIRECT_OVER_NETWORK: &str = "read with direct I/O";

/// The operation that links a file of another checkpoint.
pub(crate) const LINK: &str = "link";

/// The operation whose failure means that the process cannot map more memory.
pub(crate) const MAP: &str = "map";

/// The system's message without the errno that the standard library adds: the exception carries the errno.
fn cause(source: &std::io::Error) -> String {
    let text = source.to_string();
    text.split(" (os error").next().unwrap_or(&text).to_owned()
}

/// What to do about the most common causes; empty for all others.
fn hint(operation: &str, source: &std::io::Error) -> &'static str {
    match source.raw_os_error() {
        Some(libc::EINVAL) if operation == DIRECT_OVER_NETWORK => {
            ": an object store is read over the network; use io=\"auto\""
        }
        Some(libc::EINVAL) if operation == DIRECT => {
            ": its file system does not support it; io=\"auto\" uses the page cache there"
        }
        Some(libc::ENOENT) if operation == OPEN_PARENT => ": it may be a symbolic link that leads nowhere",
        Some(libc::ENOTDIR) => ": a part of the path is a file",
        Some(libc::EACCES) => ": check the owner and the mode of it and of the directories above it",
        Some(libc::ENOSPC) => ": free space or save elsewhere; nothing of this save was kept",
        Some(libc::EDQUOT) => ": your quota is used up; nothing of this save was kept",
        Some(libc::EFBIG) => ": the process has a file size limit (see `ulimit -f`)",
        Some(libc::ENOMEM) if operation == MAP => {
            ": load without mmap=True, or allow the process more mappings (sysctl vm.max_map_count) or addresses \
             (`ulimit -v`)"
        }
        Some(libc::EMFILE) => ": too many open files (see `ulimit -n`)",
        Some(libc::ENFILE) => ": too many open files on this machine (see sysctl fs.file-max)",
        Some(libc::EROFS) => ": choose a directory that can be written",
        Some(libc::EXDEV) if operation == LINK => ": it is on another file system",
        // An overlay cannot rename directories of its lower layers.
        Some(libc::EXDEV) => {
            ": it is in a layer of a container image and cannot be replaced: save to another name, or to a \
             volume"
        }
        Some(libc::EAGAIN) => ": the kernel refused it for two seconds; the machine may be short of memory",
        Some(libc::EIO) => ": the device reported a failure, so treat these bytes as lost",
        _ => "",
    }
}

/// Which operation hangs, and what to do.
fn hangs(operation: &str, path: &Path, seconds: f64, end: Given) -> String {
    let end = match end {
        Given::Up => {
            "the save was given up, and nothing of it gets the checkpoint's name. It keeps its threads and buffers until the \
             storage answers: check the storage, save elsewhere, or allow more time with IO(deadline=...)"
        }
        Given::UpAtTheEnd => {
            "the save was given up while the checkpoint was getting its name: once the storage answers, the new \
             checkpoint may be there, whole, or the old one. Check the storage, or save elsewhere"
        }
        Given::NotBegun => {
            "an earlier save to this directory was given up for this reason, and this save has not begun. Check the \
             storage, or save elsewhere"
        }
    };
    format!(
        "cannot {operation} `{}`: the storage has not answered for {seconds:.1} s: {end}",
        Visible(&path.display())
    )
}

/// The message of a panic.
pub(crate) fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_of_a_file_cannot_steer_a_terminal() {
        let error = Error::corrupt(Path::new("/c/\x1b[2J"), "tensor `\u{9b}31m\u{202e}\n\r\u{7f}é\u{2069}`");
        let text = r"corrupt checkpoint: `/c/\u{1b}[2J`: tensor `\u{9b}31m\u{202e}\n\r\u{7f}é\u{2069}`";
        assert_eq!(error.to_string(), text);
    }

    #[test]
    fn a_message_names_operation_path_cause_and_remedy() {
        let error = Error::io("write", Path::new("/ckpt/model.safetensors"))(
            std::io::Error::from_raw_os_error(libc::ENOSPC),
        );
        let text = error.to_string();
        for part in ["write", "/ckpt/model.safetensors", "No space left", "free space"] {
            assert!(text.contains(part), "{text}");
        }
    }
}
