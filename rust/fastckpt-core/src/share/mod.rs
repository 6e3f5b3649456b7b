//! The division of work on one checkpoint among ranks: which rank reads or writes which bytes of the files, and which
//! bytes travel between which ranks. Pure: every rank computes the same result, so ranks need not exchange it.
//!
//! A [`Spread`] lists which ranks have which boxes of a tensor. The [`Share`] of a job has all tensors, their places in
//! the files and their spreads. From these, [`Share::duties`] derives the duties of one rank: the ranges of files that
//! it reads or writes, and its messages, each of many items. [`Share::merge`] and [`Share::cover_all`] put checksums of
//! ranges together. [`Share::copied`] lists the bytes that a rank holds and others hold, too.

mod bytes;
mod cover;
mod deal;
mod duties;
mod held;
mod messages;
mod owners;
mod pieces;
mod place;
mod read;
mod replicas;
mod runs;
mod spread;
mod table;
mod teams;
#[cfg(test)]
mod tests;
mod tiles;

pub use self::duties::{Duties, FileRange};
pub use self::messages::{Item, Message};
pub use self::pieces::Piece;
pub use self::replicas::{Copied, Depth};
pub use self::runs::Purpose;
pub use self::spread::{Bounds, Placement, Spread};
pub use self::table::{PLAN, Share, Tensor};
