//! The memory of other processes of this host, read in place.

use std::io;
use std::sync::OnceLock;

use rustix::rand::{GetRandomFlags, getrandom};

use super::memory::MOST_VECTORS;

/// Reads memory of a process. Each part has an address there and a destination for the bytes. Fails if this process may
/// not read that memory, or if a byte does not exist there.
pub fn read(process: u32, parts: &mut [(u64, &mut [u8])]) -> io::Result<()> {
    for parts in parts.chunks_mut(MOST_VECTORS) {
        let (mut there, mut here): (Vec<libc::iovec>, _) = (Vec::new(), Vec::with_capacity(parts.len()));
        for (address, to) in &mut *parts {
            // The kernel takes the lock of that memory once for each entry of `there`.
            match there.last_mut() {
                Some(last) if (last.iov_base.addr() + last.iov_len) as u64 == *address => {
                    last.iov_len += to.len();
                }
                _ => there.push(libc::iovec {
                    iov_base: std::ptr::without_provenance_mut(*address as usize),
                    iov_len: to.len(),
                }),
            }
            here.push(libc::iovec { iov_base: to.as_mut_ptr().cast(), iov_len: to.len() });
        }
        let wanted: usize = parts.iter().map(|(_, to)| to.len()).sum();
        let counts = [here.len(), there.len()].map(|count| count as libc::c_ulong);
        let process = process.cast_signed();
        // SAFETY: `here` names memory that is borrowed for this call alone. The kernel checks all of `there`, which no
        // code of this process accesses.
        let read = unsafe {
            libc::process_vm_readv(process, here.as_ptr(), counts[0], there.as_ptr(), counts[1], 0)
        };
        match usize::try_from(read) {
            Ok(read) if read == wanted => {}
            Ok(_) => return Err(io::Error::from_raw_os_error(libc::EFAULT)),
            Err(_) => return Err(io::Error::last_os_error()),
        }
    }
    Ok(())
}

/// Random bytes by which another process recognises this one. A process id is not enough: in a container, it may belong
/// to a different process outside.
#[must_use]
pub fn token() -> Option<&'static [u8; 16]> {
    static TOKEN: OnceLock<Option<[u8; 16]>> = OnceLock::new();
    let random = || {
        let mut token = [0; 16];
        (getrandom(&mut token, GetRandomFlags::empty()) == Ok(token.len())).then_some(token)
    };
    TOKEN.get_or_init(random).as_ref()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_read_and_what_is_not_there_is_an_error() {
        let own = std::process::id();
        let from: Vec<u8> = (0..5000u32).map(|number| number as u8).collect();
        let at = |place: usize| from.as_ptr().addr() as u64 + place as u64;
        for backwards in [false, true] {
            let mut to = vec![0; from.len()];
            let mut parts: Vec<_> =
                to.chunks_mut(2).enumerate().map(|(number, to)| (at(2 * number), to)).collect();
            if backwards {
                parts.reverse();
            }
            assert!(parts.len() > MOST_VECTORS);
            read(own, &mut parts).unwrap();
            assert_eq!(to, from);
        }
        let mut byte = [0];
        assert_eq!(read(own, &mut [(8, &mut byte)]).unwrap_err().raw_os_error(), Some(libc::EFAULT));
        let mut two = [0; 2];
        let (first, second) = two.split_at_mut(1);
        assert!(read(own, &mut [(at(0), first), (8, second)]).is_err());
        assert!(read(0x3fff_ffff, &mut [(at(0), &mut byte)]).is_err());
        assert_eq!(token(), token());
    }
}
