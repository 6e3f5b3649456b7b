//! A shard of another checkpoint taken over as it is: its tensors have not changed.

use crate::commit::Workspace;
use crate::error::{Error, Result};
use crate::format::manifest::ShardEntry;
use crate::read::Checkpoint;

/// Takes the shard `file` of the checkpoint `from` over into `workspace`, as `name`: by a hard link, or by a copy where
/// the file system has none, which takes no space where it shares blocks. Returns its entry for the manifest, made of
/// that in `from`.
///
/// The length is compared with what was written; the content is not read.
pub fn link_shard(workspace: &Workspace, from: &Checkpoint, file: &str, name: &str) -> Result<ShardEntry> {
    let entry = from.body().shards.iter().find(|shard| shard.file == file).ok_or_else(|| {
        Error::Invalid(format!("cannot link a shard: `{}` has no shard `{file}`", from.path().display()))
    })?;
    workspace.link((from.directory(), from.path()), file, name, entry.bytes)?;
    Ok(ShardEntry { file: name.to_owned(), ..entry.clone() })
}
