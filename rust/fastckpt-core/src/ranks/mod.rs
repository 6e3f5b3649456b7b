//! What one of many ranks does of a save or a load.

mod load;
pub mod mail;
mod places;

pub use self::load::{Loaded, RankLoad};
pub use self::places::{Place, Places};
