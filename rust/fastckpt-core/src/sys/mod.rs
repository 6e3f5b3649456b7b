//! The border to the kernel: the only place in this crate with unsafe code.
#![allow(unsafe_code)]

pub mod arena;
pub mod buf;
pub mod file;
pub mod priority;
pub mod ring;
pub mod shm;
