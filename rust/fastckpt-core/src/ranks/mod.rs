//! What one of many ranks does of a save or a load.

mod held;
pub mod mail;
pub mod pieces;
mod save;
mod table;
mod work;

pub use self::held::Held;
pub use self::save::{Commit, Committed, Figures, RankSave};
pub use self::table::Table;
