//! Groups: families of files, by the names of their tensors (`docs/format.md`, 2).

/// The name that safetensors reserves for itself.
pub const RESERVED_NAME: &str = "__metadata__";
/// The group of files that Hugging Face's readers look for.
pub const MODEL: &str = "model";
/// The group of everything else, if the model is separate.
pub const TRAINING: &str = "training";

/// A family of files: the tensors whose names start with its prefix. The headers of the files omit the prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The start of the names of its files.
    pub stem: String,
    /// The start of the names of its tensors.
    pub prefix: String,
    /// The start of names that are not its own all the same; none if empty.
    pub without: String,
}

/// The groups of a state whose model has names that start with `prefix`. If `prefix` is empty, the model is everything.
#[must_use]
pub fn of(prefix: &str) -> Vec<Group> {
    beside(prefix, "")
}

/// The same, but names that start with `training` are not the model's, unless `training` is empty.
#[must_use]
pub fn beside(prefix: &str, training: &str) -> Vec<Group> {
    let group = |stem: &str, prefix: &str, without: &str| Group {
        stem: stem.to_owned(),
        prefix: prefix.to_owned(),
        without: without.to_owned(),
    };
    let rest = (!prefix.is_empty() || !training.is_empty()).then(|| group(TRAINING, "", ""));
    [group(MODEL, prefix, training)].into_iter().chain(rest).collect()
}

impl Group {
    /// Whether a tensor called `name` belongs to this group.
    pub(crate) fn holds(&self, name: &str) -> bool {
        (self.without.is_empty() || !name.starts_with(&self.without))
            && name.strip_prefix(&self.prefix).is_some_and(|name| name != RESERVED_NAME)
    }
}

/// The name that Hugging Face gives shard `index` of `count`.
pub(super) fn shard_name(stem: &str, index: usize, count: usize) -> String {
    if count == 1 {
        format!("{stem}.safetensors")
    } else {
        format!("{stem}-{:05}-of-{count:05}.safetensors", index + 1)
    }
}

/// Whether `name` is one that `shard_name` gives.
#[must_use]
pub fn is_shard_name(name: &str) -> bool {
    let Some(name) = name.strip_suffix(".safetensors") else { return false };
    let digits = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    [MODEL, TRAINING].iter().filter_map(|stem| name.strip_prefix(stem)).any(|rest| {
        let numbers = rest.strip_prefix('-').and_then(|rest| rest.split_once("-of-"));
        rest.is_empty() || numbers.is_some_and(|(index, count)| digits(index) && digits(count))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_belongs_to_the_first_group_that_holds_it() {
        let group = |prefix, training, name: &str| {
            beside(prefix, training).iter().position(|group| group.holds(name)).unwrap()
        };
        assert_eq!((of("").len(), beside("", "p.").len(), beside("m.", "p.").len()), (1, 2, 2));
        assert_eq!((group("", "p.", "p.0.w"), group("", "p.", "w"), group("", "", "p.0.w")), (1, 0, 0));
        assert_eq!((group("m.", "p.", "m.w"), group("m.", "p.", "p.w"), group("p.", "p.", "p.w")), (0, 1, 1));
        assert_eq!(group("m.", "", "m.__metadata__"), 1);
    }
}
