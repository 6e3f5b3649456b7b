//! Copies tensors of a checkpoint piece by piece, for a save of another checkpoint's tensors. Each piece is verified.

use super::checkpoint::Checkpoint;
use crate::engine::report::Damage;
use crate::error::{Error, Result};
use crate::format::{checksum, geometry};

impl Checkpoint {
    /// Fills `to` with the stored bytes at `start` of a tensor. Every extent that this range touches is read whole
    /// and compared with its checksum.
    pub fn copy(&self, tensor: usize, start: u64, to: &mut [u8]) -> Result<()> {
        self.copy_now(tensor, start, to).map_err(|error| self.settle(error))
    }

    fn copy_now(&self, tensor: usize, start: u64, to: &mut [u8]) -> Result<()> {
        let entry = self.body.tensors.get(tensor);
        let entry = entry.ok_or_else(|| Error::Invalid(format!("there is no tensor {tensor}")))?;
        let range = start..start + to.len() as u64;
        if range.end > entry.bytes() {
            return Err(Error::Invalid(format!("tensor `{}` ends at {}", entry.name(), entry.bytes())));
        }
        if range.is_empty() {
            return Ok(());
        }
        let name = &self.body.shards[entry.shard()].file;
        let shard = self.open_shard(entry.shard(), false)?;
        let mut whole = Vec::new();
        for (extent, part) in geometry::extents(entry.placement(tensor), range, self.body.block_size) {
            let to = &mut to[(part.start - start) as usize..(part.end - start) as usize];
            let covered = to.len() as u64 == extent.len;
            whole.resize(if covered { 0 } else { extent.len as usize }, 0);
            let bytes = if covered { &mut *to } else { &mut whole[..] };
            let got = shard.read_at(bytes, extent.offset);
            let got = got.map_err(|error| Error::io("read", &self.path_of(name))(error))?;
            let (found, written) = (checksum::of(bytes), entry.extent_crc(extent.index));
            if got < bytes.len() || written != Some(found) {
                return Err(self.raised(Damage {
                    file: name.clone(),
                    offset: extent.offset,
                    len: extent.len,
                    tensor: Some(entry.name().to_owned()),
                    reason: format!(
                        "checksum is {}, expected {}",
                        checksum::to_hex(found),
                        written.map_or_else(String::new, checksum::to_hex)
                    ),
                }));
            }
            if !covered {
                let at = (part.start - extent.start) as usize;
                to.copy_from_slice(&whole[at..at + to.len()]);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::geometry::PAGE;
    use crate::save::tests::saved;

    #[test]
    fn every_range_is_what_was_saved_and_damage_beside_it_is_found() {
        let parent = tempfile::tempdir().unwrap();
        let path = saved(&parent.path().join("c"), [7, 9]);
        let checkpoint = Checkpoint::open(&path).unwrap();
        let size = checkpoint.body.tensors[1].bytes();
        for (from, to) in
            [(0, size), (0, 1), (1, PAGE), (PAGE - 1, 2 * PAGE + 1), (size - 1, size), (size, size)]
        {
            let mut bytes = vec![0; (to - from) as usize];
            checkpoint.copy(1, from, &mut bytes).unwrap();
            assert!(bytes.iter().all(|&byte| byte == 9), "{from}..{to}");
        }
        assert!(checkpoint.copy(1, size, &mut [0]).is_err());
        assert!(checkpoint.copy(2, 0, &mut [0]).is_err());
        let entry = &checkpoint.body.tensors[1];
        let file = path.join(&checkpoint.body.shards[entry.shard()].file);
        let mut content = std::fs::read(&file).unwrap();
        content[(entry.offset + PAGE) as usize] ^= 1;
        std::fs::write(&file, content).unwrap();
        // This byte is in the same extent as the damage beside it.
        let error = checkpoint.copy(1, PAGE + 1, &mut [0]).unwrap_err();
        assert!(
            matches!(error, Error::Corrupt { .. }) && error.to_string().contains("tensor `b`"),
            "{error}"
        );
    }
}
