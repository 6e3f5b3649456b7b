//! What one of many ranks does of a save or a load.

pub mod mail;
