//! The target of the process: the required throughput of its saves and loads.

use std::sync::OnceLock;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use crate::environment::Environment;

/// Bytes/s per GPU for saves and for loads, 0 for none. The first call sets them to `initial`.
fn current(initial: impl FnOnce() -> (u64, u64)) -> &'static [AtomicU64; 2] {
    static TARGETS: OnceLock<[AtomicU64; 2]> = OnceLock::new();
    TARGETS.get_or_init(|| {
        let (save, load) = initial();
        [save.into(), load.into()]
    })
}

/// The targets of the process for saves and for loads, in bytes/s per GPU. 0 means no target, or that the variable does
/// not parse.
pub(super) fn targets(environment: &Environment) -> (u64, u64) {
    let given = || environment.text("FASTCKPT_TOP_TARGET").and_then(parse_targets);
    let [save, load] = current(|| given().unwrap_or((0, 0)));
    (save.load(Relaxed), load.load(Relaxed))
}

/// Changes the targets.
pub(super) fn set(save: u64, load: u64) {
    let [wanted_save, wanted_load] = current(|| (save, load));
    wanted_save.store(save, Relaxed);
    wanted_load.store(load, Relaxed);
}

/// Units of a rate, in lower case, with their bytes per second.
const UNITS: [(&str, f64); 9] = [
    ("tb/s", 1e12),
    ("gb/s", 1e9),
    ("mb/s", 1e6),
    ("kb/s", 1e3),
    ("tib/s", 1024.0 * 1024.0 * 1024.0 * 1024.0),
    ("gib/s", 1024.0 * 1024.0 * 1024.0),
    ("mib/s", 1024.0 * 1024.0),
    ("kib/s", 1024.0),
    ("b/s", 1.0),
];

/// A smaller number without a unit is refused: the user probably means another unit than bytes/s.
const LEAST_BARE: f64 = 1e4;

/// The bytes/s of a rate such as `2.5gb/s`, or of a bare number. `None` below 1, or beyond any storage.
fn rate(text: &str) -> Option<u64> {
    let text = text.trim();
    let unit = UNITS.iter().find_map(|(unit, scale)| Some((text.strip_suffix(unit)?.trim_end(), *scale)));
    let (number, scale) = unit.unwrap_or((text, 1.0));
    let value = number.parse::<f64>().ok()? * scale;
    #[expect(clippy::cast_sign_loss, reason = "checked to be positive")]
    let found = (1.0..1e18).contains(&value).then_some(value as u64);
    found.filter(|_| unit.is_some() || value >= LEAST_BARE)
}

/// Parses a tier's name, a rate for both saves and loads, or `save=RATE,load=RATE`. A rate is a number with a unit
/// (`2.5GB/s`; a GB is 10^9 bytes), or a number of bytes/s. Returns bytes/s, and 0 for a part that `text` leaves out.
/// The tiers are from NVIDIA's DGX H100 sizing, per GPU. `fastckpt-top` parses the same grammar in Python, and both are
/// tested with `tests/data/targets.txt`.
#[must_use]
pub fn parse_targets(text: &str) -> Option<(u64, u64)> {
    let text = text.trim().to_ascii_lowercase();
    match text.as_str() {
        "light" => return Some((750_000_000, 1_000_000_000)),
        "medium" => return Some((1_500_000_000, 2_000_000_000)),
        "high" => return Some((3_000_000_000, 4_000_000_000)),
        _ => {}
    }
    if let Some(both) = rate(&text) {
        return Some((both, both));
    }
    let mut targets = (0, 0);
    for part in text.split(',') {
        let (name, value) = part.split_once('=')?;
        match name.trim() {
            "save" => targets.0 = rate(value)?,
            "load" => targets.1 = rate(value)?,
            _ => return None,
        }
    }
    Some(targets)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shared_table_holds() {
        let table = include_str!("../../../../tests/data/targets.txt");
        let rows = table.lines().filter(|line| !line.starts_with('#'));
        for (text, expected) in rows.map(|line| line.split_once(" -> ").unwrap()) {
            let found = parse_targets(text).map(|(save, load)| format!("{save} {load}"));
            assert_eq!(found.as_deref().unwrap_or("refused"), expected, "{text:?}");
        }
    }
}
