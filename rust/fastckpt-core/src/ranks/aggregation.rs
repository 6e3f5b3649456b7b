//! Whether ranks collect their pieces before they write, and in what grains: by the file system, or as requested.
//!
//! On a file system of one kernel, each rank writes its bytes in place. A file system of many kernels locks the ranges
//! that each kernel writes. There, long aligned ranges with one writer each justify the cost of sending bytes.

use std::os::fd::AsFd as _;
use std::path::Path;

use crate::commit::{Reach, directory_at, is_nfs, reach};
use crate::environment::Environment;
use crate::error::{Error, Result};

/// The default grain of ranks that collect their pieces although the file system locks nothing.
const LEAST: u64 = 64 << 10;
/// The default grain on NFS, which sends at most this many bytes in one request.
const REQUEST: u64 = 1 << 20;
/// The default grain on other shared file systems. They do not report their units, so it is the usual stripe or block.
const STRIPE: u64 = 4 << 20;
/// The longest grain.
const MOST: u64 = 64 << 20;

/// How the ranks of a save share the writing ([`crate::share::Share::in_teams`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Aggregation {
    /// The size of a grain in bytes: writers change only at its multiples.
    pub grain: u64,
    /// The number of ranks that collect their pieces together: 1 for none, 0 for as many as the pieces need.
    pub team: u32,
}

impl Aggregation {
    /// The values for a save to `path` by ranks with memory pages of `page` bytes. `FASTCKPT_AGGREGATE` is `auto`,
    /// `off` or the ranks of a team, and `FASTCKPT_GRAIN` is the size of a grain in bytes.
    pub fn of(path: &Path, page: u64, environment: &Environment) -> Result<Self> {
        let wrong = |name: &str, what: &str| {
            let given = environment.get(name).unwrap_or_default().to_string_lossy();
            Error::Invalid(format!("environment variable {name}: `{given}` is not {what}"))
        };
        let team = match environment.get("FASTCKPT_AGGREGATE").map(|text| text.to_str().unwrap_or_default()) {
            None | Some("auto") => None,
            Some("off") => Some(1),
            Some(text) => {
                let number = text.parse().ok().filter(|&ranks: &u32| ranks > 0);
                Some(
                    number
                        .ok_or_else(|| wrong("FASTCKPT_AGGREGATE", "`auto`, `off` or a number of ranks"))?,
                )
            }
        };
        let grain = match environment.get("FASTCKPT_GRAIN") {
            None => None,
            Some(text) => {
                let bytes = text.to_str().and_then(|text| text.parse::<u64>().ok());
                let fits = |bytes: &u64| bytes.is_power_of_two() && (page..=MOST).contains(bytes);
                let what = format!("a power of two from {page} to {MOST}, in bytes");
                Some(bytes.filter(fits).ok_or_else(|| wrong("FASTCKPT_GRAIN", &what))?)
            }
        };
        let directory = directory_at(path);
        let (usual, longest) = match directory.as_ref().map(|directory| directory.as_fd()) {
            Some(directory) if is_nfs(directory) => (0, REQUEST),
            Some(directory) if reach(directory) != Reach::Machine => (0, STRIPE),
            _ => (1, LEAST),
        };
        let team = team.unwrap_or(usual);
        // Writes in place are cut at pages, so that each rank writes its own bytes.
        let usual = if team == 1 { page } else { longest.max(page) };
        Ok(Self { grain: grain.unwrap_or(usual), team })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_decides_and_else_the_file_system() {
        let directory = tempfile::tempdir().unwrap();
        let of = |variables: &[(&str, &str)], page| {
            let look_up = |name: &str| {
                let found = variables.iter().find(|variable| variable.0 == name);
                found.map(|variable| variable.1.into())
            };
            Aggregation::of(&directory.path().join("not there/c"), page, &Environment::of(look_up))
                .map_err(|error| error.to_string())
        };
        let (aggregate, grain) = ("FASTCKPT_AGGREGATE", "FASTCKPT_GRAIN");
        assert_eq!(of(&[], 4096), Ok(Aggregation { grain: 4096, team: 1 }));
        assert_eq!(of(&[(aggregate, "auto")], 65536), Ok(Aggregation { grain: 65536, team: 1 }));
        assert_eq!(of(&[(aggregate, "off")], 4096), Ok(Aggregation { grain: 4096, team: 1 }));
        assert_eq!(of(&[(aggregate, "8")], 4096), Ok(Aggregation { grain: LEAST, team: 8 }));
        let both = [(aggregate, "8"), (grain, "8192")];
        assert_eq!(of(&both, 4096), Ok(Aggregation { grain: 8192, team: 8 }));
        assert!(
            of(&both, 16384).unwrap_err().contains("FASTCKPT_GRAIN: `8192` is not a power of two from 16384")
        );
        for text in ["0", "-1", "on", "1.5"] {
            assert!(of(&[(aggregate, text)], 4096).unwrap_err().contains("a number of ranks"), "{text}");
        }
        assert!(of(&[(grain, "12288")], 4096).is_err() && of(&[(grain, "128M")], 4096).is_err());
    }
}
