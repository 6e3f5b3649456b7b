//! The part of one of many ranks in a save or a load.

mod aggregation;
mod base;
mod compare;
mod contents;
mod held;
mod load;
pub mod mail;
mod near;
pub mod pieces;
mod places;
mod replicas;
mod save;
mod sums;
mod table;
mod work;

pub use self::aggregation::Aggregation;
pub use self::base::RankBase;
pub use self::held::Held;
pub use self::load::{Loaded, RankLoad, compare};
pub use self::places::{Place, Places};
pub use self::replicas::{Cell, Digest, Replicas, SumOf};
pub use self::save::{Commit, RankSave};
pub use self::sums::Sums;
pub use self::table::Table;
pub use crate::save::{Committed, Figures};
