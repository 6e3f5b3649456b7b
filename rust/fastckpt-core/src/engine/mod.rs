//! The code that moves blocks: the choice of an engine, the run of its workers, their backends, and their reports.

pub mod choice;
pub mod content;
mod cores;
pub mod deadline;
pub mod io;
pub mod job;
pub mod limiter;
pub mod memory;
pub mod options;
pub mod path;
pub(crate) mod pool;
pub mod report;
pub mod run;
mod tell;
#[cfg(test)]
mod tests;
mod worker;
