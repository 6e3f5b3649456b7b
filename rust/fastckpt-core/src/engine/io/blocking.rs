//! One blocking `preadv` or `pwritev` at a time.

use std::io;

use super::backend::{Backend, Completed};
use super::transfer::Transfer;

/// Carries out an operation during `submit` and holds its result until `wait`.
#[derive(Debug, Default)]
pub struct Blocking {
    completed: Option<Completed>,
}

impl Backend for Blocking {
    fn queue_depth(&self) -> usize {
        1
    }

    fn submit(&mut self, mut transfer: Transfer) -> io::Result<()> {
        debug_assert!(self.completed.is_none(), "a blocking backend has depth 1");
        let result = transfer.carry_out();
        self.completed = Some((transfer, result));
        Ok(())
    }

    fn wait(&mut self) -> io::Result<Option<Completed>> {
        Ok(self.completed.take())
    }
}
