//! A tensor in the manifest (`docs/format.md`, 3.2), stored in little memory: there may be four million tensors.

use safetensors::Dtype;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::format::checksum::{self, HEX};
use crate::format::frugal::{Text, up_to};
use crate::format::geometry::{self, Placement};
use crate::format::layout;
use crate::format::limits::MAX_DIMENSIONS;

/// All fields of a tensor in a manifest.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(expecting = "a tensor")]
pub struct Unpacked<'a> {
    /// The name. The shard's header has it without the shard's prefix.
    #[serde(borrow)]
    pub name: Text<'a>,
    /// Stored dtype.
    pub dtype: Dtype,
    /// Stored shape.
    #[serde(deserialize_with = "up_to::<_, _, MAX_DIMENSIONS>")]
    pub shape: Vec<u64>,
    /// Index of the tensor's shard.
    pub shard: usize,
    /// First byte in the file.
    pub offset: u64,
    /// CRCs of the extents, 16 digits each.
    pub crc: Text<'a>,
    /// CRC-64/XZ of all bytes; empty if it was not computed.
    #[serde(default, skip_serializing_if = "Text::is_empty")]
    pub crc64xz: Text<'a>,
    /// Logical dtype and shape, if they differ from the stored ones.
    #[serde(rename = "as", default, skip_serializing_if = "Option::is_none")]
    pub logical: Option<Logical<'a>>,
}

/// The type of a tensor whose dtype safetensors cannot name.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(expecting = "a type")]
pub struct Logical<'a> {
    /// The dtype, such as `torch.complex128` or `numpy.>f8`.
    #[serde(borrow)]
    pub dtype: Text<'a>,
    /// The logical shape.
    #[serde(deserialize_with = "up_to::<_, _, MAX_DIMENSIONS>")]
    pub shape: Vec<u64>,
}

/// A tensor in the manifest. It takes less memory than the bytes of the smallest entry in the file.
#[derive(Debug, Clone)]
pub struct TensorEntry {
    /// First byte in the file.
    pub offset: u64,
    /// Shape, name, second checksum, checksums of extents, logical type, each as [`Packed`] reads it.
    packed: Box<str>,
    shard: u32,
    /// Stored dtype.
    pub dtype: Dtype,
}

/// Numbers and texts in one text. A number has six bits in each byte, the lowest first, and a mark in all but the last
/// byte: never more bytes than decimal digits. A text follows its length, and a shape follows its number of dimensions.
struct Packed<'a>(&'a str);

impl<'a> Packed<'a> {
    const BITS: usize = 6;
    const MARK: u8 = 1 << Self::BITS;

    fn number(&mut self) -> u64 {
        let mut value = 0;
        for (place, byte) in self.0.bytes().enumerate() {
            value |= u64::from(byte % Self::MARK) << (Self::BITS * place);
            if byte < Self::MARK {
                self.0 = &self.0[place + 1..];
                break;
            }
        }
        value
    }

    fn text(&mut self) -> &'a str {
        let text;
        let len = self.number() as usize;
        (text, self.0) = self.0.split_at(len);
        text
    }

    fn shape(&mut self) -> impl Iterator<Item = u64> {
        (0..self.number()).map(|_| self.number())
    }

    fn push(all: &mut String, mut number: u64) {
        while number >= u64::from(Self::MARK) {
            all.push(char::from((number % u64::from(Self::MARK)) as u8 | Self::MARK));
            number >>= Self::BITS;
        }
        all.push(char::from(number as u8));
    }

    fn push_text(all: &mut String, text: &Text<'_>) {
        Self::push(all, text.len() as u64);
        text.append_to(all);
    }

    fn push_shape(all: &mut String, shape: &[u64]) {
        Self::push(all, shape.len() as u64);
        for &size in shape {
            Self::push(all, size);
        }
    }
}

impl From<Unpacked<'_>> for TensorEntry {
    fn from(tensor: Unpacked<'_>) -> Self {
        let Unpacked { name, dtype, shape, shard, offset, crc, crc64xz, logical } = tensor;
        let texts = [&name, &crc64xz, &crc];
        let bytes = texts.iter().map(|text| text.len()).sum::<usize>();
        let logical_bytes =
            logical.as_ref().map_or(0, |logical| logical.dtype.len() + 2 * logical.shape.len());
        let mut packed = String::with_capacity(bytes + logical_bytes + 2 * shape.len() + 8);
        Packed::push_shape(&mut packed, &shape);
        for text in texts {
            Packed::push_text(&mut packed, text);
        }
        if let Some(Logical { dtype, shape }) = logical {
            Packed::push_text(&mut packed, &dtype);
            Packed::push_shape(&mut packed, &shape);
        }
        // No shard has this number. It represents all numbers that are too large.
        let shard = u32::try_from(shard).unwrap_or(u32::MAX);
        Self { offset, packed: packed.into_boxed_str(), shard, dtype }
    }
}

impl TensorEntry {
    /// Returns this entry with another shard.
    #[must_use]
    pub fn in_shard(self, shard: usize) -> Self {
        Self { shard: u32::try_from(shard).unwrap_or(u32::MAX), ..self }
    }

    /// All fields of this entry.
    #[must_use]
    pub fn unpacked(&self) -> Unpacked<'_> {
        let ([name, crc64xz, crc], _) = self.texts();
        let [name, crc64xz, crc] = [name, crc64xz, crc].map(Text::from);
        let logical = self.logical().map(|(dtype, shape)| Logical { dtype: dtype.into(), shape });
        let (shape, shard) = (self.shape(), self.shard());
        Unpacked { name, dtype: self.dtype, shape, shard, offset: self.offset, crc, crc64xz, logical }
    }

    /// Name, second checksum and checksums of extents, and the fields after them.
    fn texts(&self) -> ([&str; 3], Packed<'_>) {
        let mut packed = Packed(&self.packed);
        packed.shape().for_each(drop);
        ([packed.text(), packed.text(), packed.text()], packed)
    }

    /// The name. The shard's header has it without the shard's prefix.
    #[must_use]
    pub fn name(&self) -> &str {
        self.texts().0[0]
    }

    /// Stored shape.
    #[must_use]
    pub fn shape(&self) -> Vec<u64> {
        Packed(&self.packed).shape().collect()
    }

    /// Index of the tensor's shard.
    #[must_use]
    pub fn shard(&self) -> usize {
        self.shard as usize
    }

    /// CRC-64/XZ of all bytes; empty if it was not computed.
    #[must_use]
    pub fn crc64xz(&self) -> &str {
        self.texts().0[1]
    }

    /// CRCs of the extents, 16 digits each.
    pub(super) fn crc(&self) -> &str {
        self.texts().0[2]
    }

    /// Logical dtype and shape, if they differ from the stored ones.
    #[must_use]
    pub fn logical(&self) -> Option<(&str, Vec<u64>)> {
        let (_, mut rest) = self.texts();
        (!rest.0.is_empty()).then(|| (rest.text(), rest.shape().collect()))
    }

    /// The shape of the logical type.
    #[must_use]
    pub fn logical_shape(&self) -> Vec<u64> {
        self.logical().map_or_else(|| self.shape(), |(_, shape)| shape)
    }

    /// The size in bytes; `None` if the size is impossible.
    pub(super) fn checked_bytes(&self) -> Option<u64> {
        layout::byte_size(self.dtype, Packed(&self.packed).shape())
    }

    /// The size in bytes, which was checked when the manifest was read.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.checked_bytes().unwrap_or(0)
    }

    /// The place of this tensor, whose number is `tensor`.
    #[must_use]
    pub fn placement(&self, tensor: usize) -> Placement {
        Placement { tensor, offset: self.offset, bytes: self.bytes() }
    }

    /// The CRC of extent `index`.
    #[must_use]
    pub fn extent_crc(&self, index: u64) -> Option<u64> {
        let at = usize::try_from(index).ok()?.checked_mul(HEX)?;
        checksum::from_hex(self.crc().as_bytes().get(at..at.checked_add(HEX)?)?)
    }

    /// The CRC of all its bytes. It does not depend on their addresses.
    #[must_use]
    pub fn whole_crc(&self, block_size: u64) -> Option<u64> {
        let placement = self.placement(0);
        let first = geometry::down(self.offset, block_size);
        (0..geometry::extent_count(self.offset, placement.bytes, block_size)).try_fold(0, |crc, index| {
            let extent = geometry::extent(&placement, first + index * block_size, block_size)?;
            Some(checksum::combine(crc, self.extent_crc(index)?, extent.len))
        })
    }
}

impl Serialize for TensorEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.unpacked().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for TensorEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Unpacked::deserialize(deserializer).map(Self::from)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn an_entry_takes_little() {
        assert_eq!(size_of::<TensorEntry>(), 32);
        let shape = vec![0, 1, 63, 64, 4095, 4096, u64::MAX];
        let digits: usize = shape.iter().map(|size| size.to_string().len()).sum();
        let mut packed = String::new();
        Packed::push_shape(&mut packed, &shape);
        assert!(packed.len() <= 1 + digits, "{} bytes for {digits} digits", packed.len());
        assert_eq!(Packed(&packed).shape().collect::<Vec<_>>(), shape);
    }

    proptest! {
        #[test]
        fn what_is_packed_is_what_was_said(
            (name, crc, crc64xz) in (".{0,80}", "[0-9a-f]{0,160}", "([0-9a-f]{16})?"),
            (shard, offset) in (0usize..1 << 32, any::<u64>()),
            shape in prop::collection::vec(any::<u64>(), 0..=MAX_DIMENSIONS),
            logical in prop::option::of((".{0,80}", prop::collection::vec(any::<u64>(), 0..=MAX_DIMENSIONS))),
        ) {
            let said = Unpacked {
                name: name.as_str().into(),
                dtype: Dtype::BF16,
                shape: shape.clone(),
                shard,
                offset,
                crc: crc.as_str().into(),
                crc64xz: crc64xz.as_str().into(),
                logical: logical
                    .as_ref()
                    .map(|(dtype, shape)| Logical { dtype: dtype.as_str().into(), shape: shape.clone() }),
            };
            let json = serde_json::to_string(&said).unwrap();
            let entry = TensorEntry::from(said);
            prop_assert_eq!((entry.name(), entry.crc(), entry.crc64xz()), (&*name, &*crc, &*crc64xz));
            prop_assert_eq!((entry.shard(), entry.offset, entry.shape()), (shard, offset, shape));
            let logical = logical.as_ref().map(|(dtype, shape)| (dtype.as_str(), shape.clone()));
            prop_assert_eq!(entry.logical(), logical);
            prop_assert_eq!(&serde_json::to_string(&entry).unwrap(), &json);
            let read: TensorEntry = serde_json::from_str(&json).unwrap();
            prop_assert_eq!(&read.packed, &entry.packed);
        }
    }
}
