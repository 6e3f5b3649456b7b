//! The border to the kernel: the only place in this crate with unsafe code.
#![allow(unsafe_code)]

pub mod buf;
pub mod file;
pub mod probe;
pub mod ring;
pub mod shm;
