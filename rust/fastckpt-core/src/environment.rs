//! The environment variables. The core never reads them itself: a `getenv` while another thread calls `setenv` can
//! crash the process, and only the caller can hold the lock that prevents that (in Python, the GIL). So the caller
//! looks up all variables and passes them down.

use std::ffi::{OsStr, OsString};

/// Every variable that the core uses.
const NAMES: [&str; 20] = [
    "FASTCKPT_AGGREGATE",
    "FASTCKPT_BLOCK_SIZE",
    "FASTCKPT_GRAIN",
    "FASTCKPT_IO",
    "FASTCKPT_JOB",
    "FASTCKPT_QUEUE_DEPTH",
    "FASTCKPT_TOP",
    "FASTCKPT_TOP_DIR",
    "FASTCKPT_TOP_TARGET",
    "FASTCKPT_ZERO_COPY",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "RANK",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_NODES",
    "WORLD_SIZE",
    "XDG_RUNTIME_DIR",
];

/// The variables that were set when an operation began; none by default. An empty variable counts as not set.
#[derive(Debug, Clone, Default)]
pub struct Environment(Vec<(&'static str, OsString)>);

impl Environment {
    /// Looks up every variable that the core uses.
    pub fn of(look_up: impl Fn(&str) -> Option<OsString>) -> Self {
        let value = |name| look_up(name).filter(|value| !value.is_empty());
        Self(NAMES.into_iter().filter_map(|name| Some((name, value(name)?))).collect())
    }

    /// The value of a variable, if it was set.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&OsStr> {
        debug_assert!(NAMES.contains(&name), "{name} is not among the variables that are looked up");
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| value.as_os_str())
    }

    /// The value of a variable, if it was set to valid UTF-8.
    #[must_use]
    pub fn text(&self, name: &str) -> Option<&str> {
        self.get(name).and_then(OsStr::to_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_empty_is_not_set() {
        let environment = Environment::of(|name| match name {
            "RANK" => Some("3".into()),
            "WORLD_SIZE" => Some(OsString::new()),
            _ => None,
        });
        assert_eq!(environment.text("RANK"), Some("3"));
        assert_eq!((environment.get("WORLD_SIZE"), environment.get("FASTCKPT_IO")), (None, None));
    }
}
