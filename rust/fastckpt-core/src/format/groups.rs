//! Groups: sets of files, distinguished by the names of their tensors (`docs/format.md`, 2).

/// The name that safetensors reserves for itself.
pub const RESERVED_NAME: &str = "__metadata__";
/// The group of files that Hugging Face's readers load.
pub const MODEL: &str = "model";
/// The name of that group if the model is an adapter. PEFT's readers look for it.
pub const ADAPTER: &str = "adapter_model";
/// The group of everything else, if the model is separate.
pub const TRAINING: &str = "training";

/// A group of files: the tensors whose names start with its prefix. The headers of the files omit the prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// The name of the group. The names of its files start with it.
    pub name: String,
    /// The prefix of the names of its tensors.
    pub prefix: String,
    /// A longer prefix whose names belong to another group; empty if there is none.
    pub without: String,
}

/// The groups of a state whose model has names that start with `prefix`. An empty `prefix` covers all tensors.
#[must_use]
pub fn of(prefix: &str) -> Vec<Group> {
    beside(prefix, "")
}

/// Like [`of`], but names that start with `training` are not the model's, unless `training` is empty.
#[must_use]
pub fn beside(prefix: &str, training: &str) -> Vec<Group> {
    let group = |name: &str, prefix: &str, without: &str| Group {
        name: name.to_owned(),
        prefix: prefix.to_owned(),
        without: without.to_owned(),
    };
    let rest = (!prefix.is_empty() || !training.is_empty()).then(|| group(TRAINING, "", ""));
    let model = if prefix.strip_suffix('.') == Some(ADAPTER) { ADAPTER } else { MODEL };
    [group(model, prefix, training)].into_iter().chain(rest).collect()
}

impl Group {
    /// Whether a tensor called `name` belongs to this group.
    pub(crate) fn holds(&self, name: &str) -> bool {
        (self.without.is_empty() || !name.starts_with(&self.without))
            && name.strip_prefix(&self.prefix).is_some_and(|name| name != RESERVED_NAME)
    }
}

/// The name of shard `index` of `count` of a group. The model's shards are at the top of the checkpoint, under Hugging
/// Face's names. Shards of another group are in a directory with the group's name, so that readers that load all
/// `*.safetensors` find only the model.
pub(super) fn shard_name(group: &str, index: usize, count: usize) -> String {
    let file = if count == 1 {
        format!("{group}.safetensors")
    } else {
        format!("{group}-{:05}-of-{count:05}.safetensors", index + 1)
    };
    if group == TRAINING { format!("{group}/{file}") } else { file }
}

/// Whether `name` is a name that `shard_name` returns.
#[must_use]
pub fn is_shard_name(name: &str) -> bool {
    match name.split_once('/') {
        Some((directory, file)) => directory == TRAINING && is_named(TRAINING, file),
        None => is_named(MODEL, name) || is_named(ADAPTER, name),
    }
}

/// Whether `file` is a name that a shard of `group` can have inside its directory.
#[must_use]
pub fn is_named(group: &str, file: &str) -> bool {
    let digits = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let rest = file.strip_prefix(group).and_then(|rest| rest.strip_suffix(".safetensors"));
    rest.is_some_and(|rest| {
        let numbers = rest.strip_prefix('-').and_then(|rest| rest.split_once("-of-"));
        rest.is_empty() || numbers.is_some_and(|(index, count)| digits(index) && digits(count))
    })
}

/// The file name in the name of a shard in a manifest: a plain name, or a name in the directory [`TRAINING`]. `None`
/// for any other name, because no shard is elsewhere.
#[must_use]
pub fn plain_name(name: &str) -> Option<&str> {
    let file = name.strip_prefix(TRAINING).and_then(|rest| rest.strip_prefix('/')).unwrap_or(name);
    let plain = !file.is_empty() && file.len() <= 255 && !file.starts_with('.');
    (plain && !file.contains(['/', '\\', '\0'])).then_some(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_a_plan_gives_are_those_of_shards() {
        let sound = ["model.safetensors", "adapter_model.safetensors", "training/training.safetensors"];
        assert!(sound.iter().all(|name| is_shard_name(name)));
        for (group, index, count) in
            [(MODEL, 0, 2), (ADAPTER, 1, 2), (TRAINING, 7, 8), (TRAINING, 99_999, 100_000)]
        {
            let name = shard_name(group, index, count);
            assert!(is_shard_name(&name) && plain_name(&name).is_some(), "{name}");
        }
        for name in [
            "training.safetensors",
            "adapter.safetensors",
            "training/adapter_model.safetensors",
            "model/model.safetensors",
            "training/model.safetensors",
            "training/training/training.safetensors",
            "/training.safetensors",
            "training//training.safetensors",
            "../model.safetensors",
            "model-1-of-2.safetensors",
            "training/",
            "",
        ] {
            assert!(!is_shard_name(name), "{name}");
        }
        let elsewhere =
            ["training/../x", "training/a/b", "model/x", "/x", "training/.x", ".x", "", "training/", "a\\b"];
        assert!(elsewhere.iter().all(|name| plain_name(name).is_none()));
        assert_eq!(
            (plain_name("x"), plain_name("training/x"), plain_name("training")),
            (Some("x"), Some("x"), Some("training"))
        );
    }

    #[test]
    fn an_adapter_has_files_of_its_own_name() {
        let names = |prefix| of(prefix).iter().map(|group| group.name.clone()).collect::<Vec<_>>();
        assert_eq!(names("adapter_model."), [ADAPTER, TRAINING]);
        for prefix in ["model.", "adapter_model", "my_adapter_model.", "adapter_model.default."] {
            assert_eq!(names(prefix), [MODEL, TRAINING], "{prefix}");
        }
    }

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
