//! The limits of a structure's tokens (`docs/format.md`, 3.4 and 4).

use crate::format::limits::{MAX_TOKENS, MAX_VALUES};

/// The maximum nesting of arrays in a structure: the array of tokens, a token, and a list in a token.
const DEPTH: usize = 3;

/// Checks the limits of an array of tokens before it is parsed: the nesting of arrays, no objects, at most one list per
/// token, and the number of tokens and values.
pub fn check(what: &str, json: &str) -> Result<(), String> {
    let (mut depth, mut tokens, mut values, mut lists) = (0usize, 1usize, 1usize, 0usize);
    let (mut in_string, mut escaped) = (false, false);
    if !json.starts_with('[') {
        return Err(format!("{what} is not an array"));
    }
    for byte in json.bytes() {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'[' => {
                depth += 1;
                lists += usize::from(depth == DEPTH);
            }
            b']' => depth = depth.saturating_sub(1),
            b'{' => return Err(format!("{what} holds an object")),
            b',' => {
                if depth == 1 {
                    tokens += 1;
                    lists = 0;
                }
                values += 1;
            }
            _ => {}
        }
        if depth > DEPTH || tokens > MAX_TOKENS || values > MAX_VALUES {
            return Err(format!("{what} is deeper or longer than the format allows"));
        }
        if lists > 1 {
            return Err(format!("{what} holds a token with more than one list in it"));
        }
    }
    Ok(())
}
