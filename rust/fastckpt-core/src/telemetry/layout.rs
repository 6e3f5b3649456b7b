//! The shared segment, byte for byte (`docs/telemetry.md`, 4 and 5). Every field is an atomic of the field's width.
//! Space without a name in that document is named `reserved` here.

use std::mem::{offset_of, size_of};
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

/// `FCKTTOP` and a zero byte.
pub const MAGIC: u64 = u64::from_le_bytes(*b"FCKTTOP\0");
/// Layout version, major.
pub const MAJOR: u16 = 1;
/// Layout version, minor.
pub const MINOR: u16 = 0;
/// Operation slots.
pub const OPERATIONS: usize = 7;
/// Thread slots.
pub const THREADS: usize = 64;
/// History records.
pub const HISTORY: usize = 64;
/// Latency buckets.
pub const BUCKETS: usize = 16;
/// `op_slot` of a worker whose operation has no slot.
pub const NO_SLOT: u32 = u32::MAX;

/// At most `8 * N` bytes of UTF-8 text, padded with zeros.
#[repr(C)]
#[derive(Debug)]
pub struct Text<const N: usize>([AtomicU64; N]);

impl<const N: usize> Default for Text<N> {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; N])
    }
}

impl<const N: usize> Text<N> {
    /// Stores `text`. If it is too long, its end is cut off.
    pub fn set(&self, text: &str) {
        let mut end = text.len().min(8 * N);
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        let mut bytes = text.as_bytes()[..end].chunks(8);
        for word in &self.0 {
            let mut eight = [0; 8];
            if let Some(chunk) = bytes.next() {
                eight[..chunk.len()].copy_from_slice(chunk);
            }
            word.store(u64::from_le_bytes(eight), Relaxed);
        }
    }

    /// The text, up to its first zero byte.
    #[must_use]
    pub fn get(&self) -> String {
        let bytes: Vec<u8> = self.0.iter().flat_map(|word| word.load(Relaxed).to_le_bytes()).collect();
        let end = bytes.iter().position(|&byte| byte == 0).unwrap_or(bytes.len());
        String::from_utf8_lossy(&bytes[..end]).into_owned()
    }

    /// Stores the value of `other`.
    pub fn copy(&self, other: &Self) {
        for (to, from) in self.0.iter().zip(&other.0) {
            to.store(from.load(Relaxed), Relaxed);
        }
    }

    /// Stores `text`. If it is too long, its start is cut off.
    pub fn set_tail(&self, text: &str) {
        let mut start = text.len().saturating_sub(8 * N);
        while !text.is_char_boundary(start) {
            start += 1;
        }
        self.set(&text[start..]);
    }
}

/// The value before anything is stored: all zeros.
trait Zero {
    const ZERO: Self;
}

impl<T: Zero, const N: usize> Zero for [T; N] {
    const ZERO: Self = [const { T::ZERO }; N];
}

impl<const N: usize> Zero for Text<N> {
    const ZERO: Self = Self(Zero::ZERO);
}

macro_rules! numbers {
    ($($atomic:ident)*) => { $(impl Zero for $atomic { const ZERO: Self = Self::new(0); })* };
}

numbers! { AtomicI32 AtomicI64 AtomicU16 AtomicU32 AtomicU64 }

macro_rules! structures {
    ($($(#[$attribute:meta])* $name:ident { $($field:ident: $kind:ty,)* })*) => {
        $(
            $(#[$attribute])*
            #[repr(C)]
            #[derive(Debug)]
            #[expect(missing_docs, reason = "the fields are documented in docs/telemetry.md, once")]
            pub struct $name { $(pub $field: $kind),* }

            impl Zero for $name {
                const ZERO: Self = Self { $($field: Zero::ZERO),* };
            }
        )*

        /// Every structure, with the name and the offset of each field. A test compares them with those of the reader.
        #[must_use]
        pub fn offsets() -> Vec<(&'static str, Vec<(&'static str, usize)>)> {
            let known = |&(name, _): &(&str, usize)| name != "reserved";
            let fields = [$((stringify!($name), vec![$((stringify!($field), offset_of!($name, $field))),*])),*];
            let fields = fields.into_iter();
            fields.map(|(name, fields)| (name, fields.into_iter().filter(known).collect())).collect()
        }
    };
}

structures! {
    /// 5.1.
    Header {
        magic: AtomicU64,
        major: AtomicU16,
        minor: AtomicU16,
        header_size: AtomicU32,
        total_size: AtomicU32,
        endian_tag: AtomicU32,
        features: AtomicU64,
        op_off: AtomicU32,
        op_stride: AtomicU32,
        op_count: AtomicU32,
        thr_off: AtomicU32,
        thr_stride: AtomicU32,
        thr_count: AtomicU32,
        hist_off: AtomicU32,
        hist_stride: AtomicU32,
        hist_count: AtomicU32,
        generation: AtomicU32,
        pid: AtomicU32,
        uid: AtomicU32,
        start_ticks: AtomicU64,
        pid_ns: AtomicU64,
        mono0_ns: AtomicU64,
        real0_ns: AtomicU64,
        boot_id: [AtomicU64; 2],
        rank: AtomicI32,
        local_rank: AtomicI32,
        world: AtomicI32,
        local_world: AtomicI32,
        gpu: AtomicI32,
        numa: AtomicI32,
        version: Text<3>,
        job: Text<8>,
        launch: AtomicU64,
        time_ns: AtomicU64,
    }

    /// 5.2.
    Process {
        heartbeat: AtomicU64,
        state: AtomicU64,
        bytes_written: AtomicU64,
        bytes_read: AtomicU64,
        saves_ok: AtomicU64,
        saves_failed: AtomicU64,
        loads_ok: AtomicU64,
        loads_failed: AtomicU64,
        hist_head: AtomicU64,
        threads_used: AtomicU64,
        verifies_ok: AtomicU64,
        verifies_failed: AtomicU64,
        target_save: AtomicU64,
        target_load: AtomicU64,
        ops_unslotted: AtomicU64,
        group: AtomicU64,
        group_rank: AtomicU32,
        group_size: AtomicU32,
        waits_for: AtomicU64,
        changed_step: AtomicI64,
        changed: AtomicU64,
        warned: AtomicU64,
        warning: Text<8>,
        bytes_copied: AtomicU64,
        copies_ok: AtomicU64,
        copies_failed: AtomicU64,
    }

    /// 5.3.
    OperationSlot {
        seq: AtomicU64,
        op_id: AtomicU64,
        kind: AtomicU32,
        phase: AtomicU32,
        engine: AtomicU32,
        flags: AtomicU32,
        fallback_errno: AtomicU32,
        threads: AtomicU32,
        bytes_total: AtomicU64,
        bytes_durable: AtomicU64,
        files_total: AtomicU32,
        files_done: AtomicU32,
        t_start_mono_ns: AtomicU64,
        t_phase_mono_ns: AtomicU64,
        t_end_mono_ns: AtomicU64,
        st_dev: AtomicU64,
        step: AtomicI64,
        block_size: AtomicU32,
        queue_depth: AtomicU32,
        target: AtomicU64,
        error: AtomicU64,
        label: Text<8>,
        path: Text<37>,
        bytes_linked: AtomicU64,
        bytes_staged: AtomicU64,
        bytes_to_stage: AtomicU64,
    }

    /// 5.4. The alignment keeps the counters of two workers out of one cache line, and out of the line that is fetched
    /// with it.
    #[repr(align(256))]
    ThreadSlot {
        bytes_ever: AtomicU64,
        requests: AtomicU64,
        bytes_submitted: AtomicU64,
        busy_ns: AtomicU64,
        source_wait_ns: AtomicU64,
        last_progress_mono_ns: AtomicU64,
        in_flight: AtomicU32,
        state: AtomicU32,
        op_slot: AtomicU32,
        errors: AtomicU32,
        latency_sum_ns: AtomicU64,
        latency_max_ns: AtomicU64,
        retries: AtomicU32,
        shorts: AtomicU32,
        fsync_wait_ms: AtomicU32,
        peer_wait_ms: AtomicU32,
        tid: AtomicU32,
        cpu: AtomicU32,
        op_id: AtomicU64,
        file: AtomicU32,
        limit_wait_ms: AtomicU32,
        bytes_op: AtomicU64,
        latency_hist: [AtomicU64; BUCKETS],
    }

    /// 5.5.
    Record {
        op_id: AtomicU64,
        kind: AtomicU32,
        result: AtomicU32,
        engine: AtomicU32,
        threads: AtomicU32,
        bytes: AtomicU64,
        t_start_real_ns: AtomicU64,
        dur_ns: AtomicU64,
        sync_ns: AtomicU64,
        peak_bps: AtomicU64,
        p50_us: AtomicU32,
        p99_us: AtomicU32,
        step: AtomicI64,
        error: AtomicU64,
        flags: AtomicU32,
        fallback_errno: AtomicU32,
        label: Text<8>,
        path: Text<12>,
    }
}

/// The whole segment: section 4 of `docs/telemetry.md`.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "the fields are documented in docs/telemetry.md, once")]
pub struct Segment {
    pub header: Header,
    pub process: Process,
    pub operations: [OperationSlot; OPERATIONS],
    pub threads: [ThreadSlot; THREADS],
    pub history: [Record; HISTORY],
}

/// A segment before anything is stored in it.
#[must_use]
pub const fn empty() -> Segment {
    Segment {
        header: Zero::ZERO,
        process: Zero::ZERO,
        operations: Zero::ZERO,
        threads: Zero::ZERO,
        history: Zero::ZERO,
    }
}

/// A segment for counters that have no place in a real one. Several threads may write to it at once. No monitor sees
/// it.
pub static UNSEEN: Segment = empty();

impl Record {
    /// Stores the value of `other`.
    pub fn copy(&self, other: &Self) {
        for (to, from) in [
            (&self.kind, &other.kind),
            (&self.result, &other.result),
            (&self.engine, &other.engine),
            (&self.threads, &other.threads),
            (&self.p50_us, &other.p50_us),
            (&self.p99_us, &other.p99_us),
            (&self.flags, &other.flags),
            (&self.fallback_errno, &other.fallback_errno),
        ] {
            to.store(from.load(Relaxed), Relaxed);
        }
        for (to, from) in [
            (&self.bytes, &other.bytes),
            (&self.t_start_real_ns, &other.t_start_real_ns),
            (&self.dur_ns, &other.dur_ns),
            (&self.sync_ns, &other.sync_ns),
            (&self.peak_bps, &other.peak_bps),
            (&self.error, &other.error),
            (&self.op_id, &other.op_id),
        ] {
            to.store(from.load(Relaxed), Relaxed);
        }
        self.step.store(other.step.load(Relaxed), Relaxed);
        self.label.copy(&other.label);
        self.path.copy(&other.path);
    }
}

const _: () = assert!(size_of::<Header>() == 256 && size_of::<Process>() == 256);
const _: () = assert!(size_of::<OperationSlot>() == 512 && size_of::<ThreadSlot>() == 256);
const _: () = assert!(size_of::<Record>() == 256 && size_of::<Segment>() == 0x9000);
const _: () = assert!(offset_of!(Segment, operations) == 0x200 && offset_of!(Segment, threads) == 0x1000);
const _: () = assert!(offset_of!(Segment, history) == 0x5000);
