//! Descriptions of a rank's incoming messages, for errors.

use std::ops::Range;

use super::mail::Contents;
use crate::share::{Item, Message, Share};

/// The range of a message's bytes, which are in one file.
struct Span {
    shard: usize,
    bytes: Range<u64>,
    first: usize,
    last: usize,
}

/// Describes the range of each of `messages`. `file` and `tensor` map a number to a name.
pub(super) fn of(
    share: &Share,
    messages: &[&Message],
    file: impl Fn(usize) -> String + Send + Sync + 'static,
    tensor: impl Fn(usize) -> String + Send + Sync + 'static,
) -> Contents {
    let span = |message: &Message| {
        let (first, last) = (message.items.first()?, message.items.last()?);
        let tensor = |item: &Item| &share.tensors()[item.tensor];
        let bytes = tensor(first).offset + first.bytes.start..tensor(last).offset + last.bytes.end;
        Some(Span { shard: tensor(first).shard, bytes, first: first.tensor, last: last.tensor })
    };
    let spans: Vec<_> = messages.iter().copied().map(span).collect();
    Box::new(move |message| {
        let Some(Some(Span { shard, bytes, first, last })) = spans.get(message) else {
            return "no bytes".to_owned();
        };
        let names = if first == last {
            format!("tensor `{}`", tensor(*first))
        } else {
            format!("tensors `{}` to `{}`", tensor(*first), tensor(*last))
        };
        format!("{names}, within bytes {} to {} of {}", bytes.start, bytes.end, file(*shard))
    })
}
