//! What moves blocks: the workers, the choice of an engine for them, their backends, and what they report.

pub mod choice;
pub mod content;
pub mod io;
pub mod limiter;
pub mod options;
pub mod report;
pub mod worker;
