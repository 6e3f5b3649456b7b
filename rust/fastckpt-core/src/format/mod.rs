//! What is on the disk (`docs/format.md`): where each byte lies, the manifest, checksums, limits. Nothing here does
//! I/O.

pub mod checksum;
pub mod decode;
pub mod geometry;
pub mod groups;
pub mod index;
pub mod layout;
pub mod limits;
pub mod manifest;
pub mod tokens;
