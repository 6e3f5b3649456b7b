//! The format on disk (`docs/format.md`): the place of each byte, the manifest, checksums and limits. Nothing here does
//! I/O.

pub mod checksum;
pub mod decode;
pub mod entry;
pub mod families;
mod frugal;
pub mod geometry;
pub mod groups;
pub mod index;
pub mod layout;
pub mod limits;
pub mod manifest;
pub mod tokens;
