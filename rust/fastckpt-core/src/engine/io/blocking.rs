//! One blocking `preadv` or `pwritev` at a time.

use std::io;

use super::{Backend, Done, Op};

/// Carries an operation out while it is submitted and holds its result until it is asked for.
#[derive(Debug, Default)]
pub struct Blocking {
    done: Option<Done>,
}

/// Carries `op` out on the spot.
#[must_use]
pub fn transfer(mut op: Op) -> Done {
    let bytes = op.range.clone();
    let result = if let Some((map, range)) = op.buf.mapped() {
        map.populate(range).map(|()| range.len())
    } else if op.write {
        op.file.write_at(op.direct, &op.buf.slices(bytes), op.offset)
    } else {
        op.file.read_at(op.direct, &mut op.buf.slices_mut(bytes), op.offset)
    };
    Done { op, result }
}

impl Backend for Blocking {
    fn submit(&mut self, op: Op) -> io::Result<()> {
        debug_assert!(self.done.is_none(), "a blocking backend has depth 1");
        self.done = Some(transfer(op));
        Ok(())
    }

    fn wait(&mut self) -> io::Result<Option<Done>> {
        Ok(self.done.take())
    }
}
