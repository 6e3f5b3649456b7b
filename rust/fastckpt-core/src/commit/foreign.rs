//! Formats of other programs, recognised by the names of their files. A directory with such files beside a checkpoint
//! would hold two states. `python/fastckpt/_foreign.py` has the same table, for messages without the core and for
//! object stores. `tests/api/test_foreign.py` compares both tables.

/// The programs and the names of their files. A name has at most one `*`.
const FORMATS: [(&str, &[&str]); 5] = [
    ("torch.distributed.checkpoint", &["*.distcp", ".metadata"]),
    ("DeepSpeed", &["*_model_states.pt", "*_optim_states.pt", "zero_to_fp32.py"]),
    ("Orbax", &["_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"]),
    ("transformers", &["pytorch_model*.bin", "pytorch_model.bin.index.json"]),
    ("safetensors", &["*.safetensors", "*.safetensors.index.json"]),
];

/// The program that writes files called `name`; `None` for any other name.
pub(super) fn writer_of(name: &[u8]) -> Option<&'static str> {
    let fits = |pattern: &str| match pattern.split_once('*') {
        Some((begin, end)) => {
            name.len() >= begin.len() + end.len()
                && name.starts_with(begin.as_bytes())
                && name.ends_with(end.as_bytes())
        }
        None => name == pattern.as_bytes(),
    };
    FORMATS
        .iter()
        .find(|(_, patterns)| patterns.iter().any(|pattern| fits(pattern)))
        .map(|(writer, _)| *writer)
}
