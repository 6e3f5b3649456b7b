//! Reads any JSON in little memory: each text is copied at most once, and no error quotes a long text. The JSON and the
//! values read from it together take at most twice the bytes of the JSON (`docs/format.md`, 3.4).

use std::fmt;
use std::marker::PhantomData;

use serde::de::{DeserializeSeed, Error as _, IntoDeserializer, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer, forward_to_deserialize_any};
use serde_json::value::RawValue;

/// The maximum length of a text that an error quotes.
const QUOTED: usize = 1000;
/// A text with escapes is read in pieces of about this many bytes.
const PIECE: usize = 64 << 10;

/// The start of a text from a file, for messages.
pub(super) fn quoted(text: &str) -> &str {
    &text[..text.char_indices().nth(QUOTED).map_or(text.len(), |(at, _)| at)]
}

/// A checked text from a file, as it is between its quotation marks; or any text without escapes.
#[derive(Debug, Clone, Copy, Default)]
pub struct Text<'a> {
    raw: &'a str,
    /// The length without escapes. An escape is longer than the character that it represents.
    len: usize,
}

impl<'a> From<&'a str> for Text<'a> {
    fn from(raw: &'a str) -> Self {
        Self { raw, len: raw.len() }
    }
}

impl<'a> Text<'a> {
    /// The length of the text in bytes, without escapes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Whether it is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The text itself, if it has no escapes.
    fn plain(&self) -> Option<&'a str> {
        (self.len == self.raw.len()).then_some(self.raw)
    }

    /// Appends the text to `all`.
    pub(super) fn append_to(&self, all: &mut String) {
        match self.plain() {
            Some(text) => all.push_str(text),
            None => pieces(self.raw).flatten().for_each(|piece| all.push_str(&piece)),
        }
    }
}

impl Serialize for Text<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.plain().unwrap_or_default())
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for Text<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?.get();
        let text = raw.strip_prefix('"').and_then(|raw| raw.strip_suffix('"'));
        let len = match text {
            Some(text) if !text.contains('\\') => Ok(text.len()),
            Some(text) => pieces(text).map(|piece| piece.map(|piece| piece.len())).sum(),
            None => serde_json::from_str::<String>(raw).map(|text| text.len()),
        };
        Ok(Self { raw: text.unwrap_or(raw), len: len.map_err(D::Error::custom)? })
    }
}

/// A text without its escapes, piece by piece.
fn pieces(mut rest: &str) -> impl Iterator<Item = serde_json::Result<String>> {
    std::iter::from_fn(move || {
        let piece;
        (piece, rest) = rest.split_at(end_of_piece(rest));
        (!piece.is_empty()).then(|| serde_json::from_str(&format!("\"{piece}\"")))
    })
}

/// Where the first piece of a text ends: inside neither an escape nor a character.
fn end_of_piece(text: &str) -> usize {
    let bytes = text.as_bytes();
    let mut at = 0;
    while at < bytes.len() && (at < PIECE || !text.is_char_boundary(at)) {
        at += match &bytes[at..] {
            // The first half of a surrogate pair, which is invalid without the second half.
            [b'\\', b'u', b'd' | b'D', b'8' | b'9' | b'a' | b'b' | b'A' | b'B', ..] => 12,
            [b'\\', b'u', ..] => 6,
            [b'\\', ..] => 2,
            _ => 1,
        };
    }
    at.min(bytes.len())
}

/// Reads an array and stops at the first element beyond the limit, not at the end of the array.
pub(super) fn up_to<'de, D: Deserializer<'de>, T: Deserialize<'de>, const MOST: usize>(
    deserializer: D,
) -> Result<Vec<T>, D::Error> {
    deserializer.deserialize_seq(Bounded::<_, MOST>(PhantomData))
}

struct Bounded<T, const MOST: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const MOST: usize> Visitor<'de> for Bounded<T, MOST> {
    type Value = Vec<T>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "an array of at most {MOST} elements")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<T>, A::Error> {
        let mut all = Vec::new();
        while let Some(element) = seq.next_element()? {
            if all.len() == MOST {
                return Err(A::Error::invalid_length(MOST + 1, &self));
            }
            all.push(element);
        }
        Ok(all)
    }
}

/// Wraps a deserializer of JSON in memory, and all its parts: visitors, arrays and so on. Without the wrapper, the
/// deserializer and its visitors would copy a text with escapes, and quote a misplaced text in the error, with escapes
/// for each of its bytes. Only visitors of numbers, arrays and objects are called.
pub(super) struct Frugal<T>(pub(super) T);

impl<'de, D: Deserializer<'de>> Deserializer<'de> for Frugal<D> {
    type Error = D::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_any(Frugal(visitor))
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_option(Frugal(visitor))
    }

    fn deserialize_string<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        let text = Text::deserialize(self.0)?;
        if let Some(text) = text.plain() {
            return visitor.visit_borrowed_str(text);
        }
        let mut all = String::with_capacity(text.len);
        text.append_to(&mut all);
        visitor.visit_string(all)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        let text = Text::deserialize(self.0)?;
        let mut name = String::new();
        if text.len < QUOTED {
            text.append_to(&mut name);
        }
        visitor.visit_enum(name.into_deserializer())
    }

    /// A part of the JSON, unchanged.
    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        name: &'static str,
        visitor: V,
    ) -> Result<V::Value, D::Error> {
        self.0.deserialize_newtype_struct(name, visitor)
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, D::Error> {
        self.0.deserialize_ignored_any(visitor)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier
    }
}

impl<'de, V: Visitor<'de>> Visitor<'de> for Frugal<V> {
    type Value = V::Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.expecting(f)
    }

    fn visit_i64<E: serde::de::Error>(self, value: i64) -> Result<V::Value, E> {
        self.0.visit_i64(value)
    }

    fn visit_u64<E: serde::de::Error>(self, value: u64) -> Result<V::Value, E> {
        self.0.visit_u64(value)
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<V::Value, E> {
        self.0.visit_f64(value)
    }

    fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<V::Value, E> {
        self.0.visit_str(quoted(text))
    }

    fn visit_none<E: serde::de::Error>(self) -> Result<V::Value, E> {
        self.0.visit_none()
    }

    fn visit_some<D: Deserializer<'de>>(self, inner: D) -> Result<V::Value, D::Error> {
        self.0.visit_some(Frugal(inner))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, array: A) -> Result<V::Value, A::Error> {
        self.0.visit_seq(Frugal(array))
    }

    fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<V::Value, A::Error> {
        self.0.visit_map(Frugal(object))
    }
}

impl<'de, A: SeqAccess<'de>> SeqAccess<'de> for Frugal<A> {
    type Error = A::Error;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.0.next_element_seed(Frugal(seed))
    }
}

impl<'de, A: MapAccess<'de>> MapAccess<'de> for Frugal<A> {
    type Error = A::Error;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<Option<S::Value>, A::Error> {
        self.0.next_key_seed(seed)
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Result<S::Value, A::Error> {
        self.0.next_value_seed(Frugal(seed))
    }
}

impl<'de, S: DeserializeSeed<'de>> DeserializeSeed<'de> for Frugal<S> {
    type Value = S::Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<S::Value, D::Error> {
        self.0.deserialize(Frugal(deserializer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read<'a, T: Deserialize<'a>>(json: &'a str) -> serde_json::Result<T> {
        let mut json = serde_json::Deserializer::from_str(json);
        T::deserialize(Frugal(&mut json))
    }

    #[test]
    fn a_text_is_what_other_readers_take_it_for() {
        let escapes =
            ["\\n", "\\\"", "\\\\", "\\u0041", "\\u00e9", "\\ud83d\\ude00", "\\uD83D\\uDE00", "é", "😀", "x"];
        // Tests every place at which a piece can end.
        for (fill, escape) in (PIECE - 13..=PIECE).flat_map(|fill| escapes.map(|escape| (fill, escape))) {
            let json = format!("\"{}{escape}{}{escape}\"", "f".repeat(fill), escape.repeat(3));
            let known: String = serde_json::from_str(&json).unwrap();
            assert!(read::<String>(&json).unwrap() == known, "{escape} after {fill} bytes");
            let (text, mut all) = (read::<Text<'_>>(&json).unwrap(), String::new());
            text.append_to(&mut all);
            assert!(all == known && text.len() == known.len(), "{escape} after {fill} bytes");
        }
        for lone in ["\\ud83d", "\\ud83d\\n", "\\ud83dx\\u0041é", "\\ude00", "\\x", "\\u12", "\n"] {
            let json = format!("\"{}{lone}\"", "é".repeat(PIECE / 2 - 2));
            assert!(read::<String>(&json).is_err() && read::<Text<'_>>(&json).is_err(), "{lone}");
        }
        for other in ["5", "null", "[\"a\"]", "{}"] {
            let error = read::<Text<'_>>(other).unwrap_err().to_string();
            assert!(error.contains("expected a string"), "{error}");
        }
    }

    #[test]
    fn no_error_quotes_a_long_text() {
        #[derive(Debug, Deserialize)]
        #[expect(dead_code, reason = "each text causes an error first")]
        struct Outer {
            inner: Option<Vec<Outer>>,
            number: u64,
            dtype: safetensors::Dtype,
            pair: (f64, i64),
        }
        let long = format!("\"{}\"", "\u{7f}".repeat(1 << 20));
        for around in [
            "?",
            r#"{"inner":?}"#,
            r#"{"inner":[?]}"#,
            r#"{"inner":[{"number":?}]}"#,
            r#"{"dtype":?}"#,
            r#"{"pair":[?]}"#,
            r#"{"pair":[1,?]}"#,
        ] {
            let json = around.replace('?', &long);
            let error = read::<Outer>(&json).unwrap_err().to_string();
            assert!(error.len() < 10 * QUOTED, "{around}: {} bytes", error.len());
            let known = around.replace('?', "\"a\"");
            let what =
                |error: serde_json::Error| error.to_string().split(" at line").next().map(str::to_owned);
            let error = serde_json::from_str::<Outer>(&known).unwrap_err();
            assert_eq!(what(read::<Outer>(&known).unwrap_err()), what(error));
        }
        let dtype = |json| read::<safetensors::Dtype>(json).ok();
        assert_eq!(dtype("\"\\u0055\\u0038\""), Some(safetensors::Dtype::U8));
        assert_eq!((dtype("\"U9\""), dtype("{\"U8\":null}")), (None, None));
    }
}
