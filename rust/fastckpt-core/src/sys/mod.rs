//! The boundary to the kernel: the only place in this crate with unsafe code.
#![allow(unsafe_code)]

pub mod array;
pub mod buffers;
pub mod cachestat;
pub mod calls;
pub mod dealt;
pub mod file;
pub mod fold;
pub mod fork;
pub mod fs;
pub mod gather;
pub mod lock;
pub mod map;
pub mod mapping;
pub mod memory;
pub mod mounts;
pub mod nice;
pub mod page;
pub mod pagemap;
pub mod probe;
pub mod remote;
pub mod ring;
pub mod shm;
pub mod slabs;
pub mod strided;
pub(crate) mod sync;
pub mod thread;
