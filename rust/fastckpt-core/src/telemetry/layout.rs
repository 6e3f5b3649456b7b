//! The shared segment, byte for byte (`docs/telemetry.md`, 4 and 5). Every field is an atomic of its own width; what is named `_` there
//! is reserved here.

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

/// Text of at most `8 * N` bytes of UTF-8, filled with zeros.
#[repr(C)]
#[derive(Debug)]
pub struct Text<const N: usize>([AtomicU64; N]);

impl<const N: usize> Default for Text<N> {
    fn default() -> Self {
        Self([const { AtomicU64::new(0) }; N])
    }
}

impl<const N: usize> Text<N> {
    /// Stores `text`; one that is too long loses its end.
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

    /// Stores what `other` holds.
    pub fn copy(&self, other: &Self) {
        for (to, from) in self.0.iter().zip(&other.0) {
            to.store(from.load(Relaxed), Relaxed);
        }
    }

    /// Stores `text`; one that is too long loses its begin.
    pub fn set_tail(&self, text: &str) {
        let mut start = text.len().saturating_sub(8 * N);
        while !text.is_char_boundary(start) {
            start += 1;
        }
        self.set(&text[start..]);
    }
}

/// 5.1.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "the fields are documented in docs/telemetry.md, once")]
pub struct Header {
    pub magic: AtomicU64,
    pub major: AtomicU16,
    pub minor: AtomicU16,
    pub header_size: AtomicU32,
    pub total_size: AtomicU32,
    pub endian_tag: AtomicU32,
    pub features: AtomicU64,
    pub op_off: AtomicU32,
    pub op_stride: AtomicU32,
    pub op_count: AtomicU32,
    pub thr_off: AtomicU32,
    pub thr_stride: AtomicU32,
    pub thr_count: AtomicU32,
    pub hist_off: AtomicU32,
    pub hist_stride: AtomicU32,
    pub hist_count: AtomicU32,
    pub generation: AtomicU32,
    pub pid: AtomicU32,
    pub uid: AtomicU32,
    pub start_ticks: AtomicU64,
    pub pid_ns: AtomicU64,
    pub mono0_ns: AtomicU64,
    pub real0_ns: AtomicU64,
    pub boot_id: [AtomicU64; 2],
    pub rank: AtomicI32,
    pub local_rank: AtomicI32,
    pub world: AtomicI32,
    pub local_world: AtomicI32,
    pub gpu: AtomicI32,
    pub numa: AtomicI32,
    pub version: Text<3>,
    pub job: Text<9>,
    pub time_ns: AtomicU64,
}

/// 5.2.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "the fields are documented in docs/telemetry.md, once")]
pub struct Process {
    pub heartbeat: AtomicU64,
    pub state: AtomicU64,
    pub bytes_written: AtomicU64,
    pub bytes_read: AtomicU64,
    pub saves_ok: AtomicU64,
    pub saves_failed: AtomicU64,
    pub loads_ok: AtomicU64,
    pub loads_failed: AtomicU64,
    pub hist_head: AtomicU64,
    pub threads_used: AtomicU64,
    pub verifies_ok: AtomicU64,
    pub verifies_failed: AtomicU64,
    pub target_save: AtomicU64,
    pub target_load: AtomicU64,
    pub ops_unslotted: AtomicU64,
    reserved: [AtomicU64; 17],
}

/// 5.3.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "the fields are documented in docs/telemetry.md, once")]
pub struct OperationSlot {
    pub seq: AtomicU64,
    pub op_id: AtomicU64,
    pub kind: AtomicU32,
    pub phase: AtomicU32,
    pub engine: AtomicU32,
    pub flags: AtomicU32,
    pub fallback_errno: AtomicU32,
    pub threads: AtomicU32,
    pub bytes_total: AtomicU64,
    pub bytes_durable: AtomicU64,
    pub files_total: AtomicU32,
    pub files_done: AtomicU32,
    pub t_start_mono_ns: AtomicU64,
    pub t_phase_mono_ns: AtomicU64,
    pub t_end_mono_ns: AtomicU64,
    pub st_dev: AtomicU64,
    pub step: AtomicI64,
    pub block_size: AtomicU32,
    pub queue_depth: AtomicU32,
    pub target: AtomicU64,
    pub error: AtomicU64,
    pub label: Text<8>,
    pub path: Text<40>,
}

/// 5.4. Its alignment keeps two workers' counters out of one cache line, and of the line fetched along with it.
#[repr(C, align(256))]
#[derive(Debug)]
#[expect(missing_docs, reason = "the fields are documented in docs/telemetry.md, once")]
pub struct ThreadSlot {
    pub bytes_ever: AtomicU64,
    pub requests: AtomicU64,
    pub bytes_submitted: AtomicU64,
    pub busy_ns: AtomicU64,
    pub source_wait_ns: AtomicU64,
    pub last_progress_mono_ns: AtomicU64,
    pub in_flight: AtomicU32,
    pub state: AtomicU32,
    pub op_slot: AtomicU32,
    pub errors: AtomicU32,
    pub latency_sum_ns: AtomicU64,
    pub latency_max_ns: AtomicU64,
    pub retries: AtomicU64,
    pub shorts: AtomicU64,
    pub tid: AtomicU32,
    pub cpu: AtomicU32,
    pub op_id: AtomicU64,
    pub file: AtomicU32,
    pub limit_wait_ms: AtomicU32,
    pub bytes_op: AtomicU64,
    pub latency_hist: [AtomicU64; BUCKETS],
}

/// 5.5.
#[repr(C)]
#[derive(Debug)]
#[expect(missing_docs, reason = "the fields are documented in docs/telemetry.md, once")]
pub struct Record {
    pub op_id: AtomicU64,
    pub kind: AtomicU32,
    pub result: AtomicU32,
    pub engine: AtomicU32,
    pub threads: AtomicU32,
    pub bytes: AtomicU64,
    pub t_start_real_ns: AtomicU64,
    pub dur_ns: AtomicU64,
    pub sync_ns: AtomicU64,
    pub peak_bps: AtomicU64,
    pub p50_us: AtomicU32,
    pub p99_us: AtomicU32,
    pub step: AtomicI64,
    pub error: AtomicU64,
    pub flags: AtomicU32,
    pub fallback_errno: AtomicU32,
    pub label: Text<8>,
    pub path: Text<12>,
}

impl Record {
    /// Stores what `other` holds.
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

/// 4: the whole.
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

const _: () = assert!(size_of::<Header>() == 256 && size_of::<Process>() == 256);
const _: () = assert!(size_of::<OperationSlot>() == 512 && size_of::<ThreadSlot>() == 256);
const _: () = assert!(size_of::<Record>() == 256 && size_of::<Segment>() == 0x9000);
const _: () = assert!(offset_of!(Segment, operations) == 0x200 && offset_of!(Segment, threads) == 0x1000);
const _: () = assert!(offset_of!(Segment, history) == 0x5000);

/// Name and offset of every field of one structure.
macro_rules! fields {
    ($structure:ident: $($field:ident)*) => {
        (stringify!($structure), vec![$((stringify!($field), offset_of!($structure, $field))),*])
    };
}

/// Every structure with the name and offset of each of its fields: what a test compares with the reader's view.
#[must_use]
pub fn offsets() -> Vec<(&'static str, Vec<(&'static str, usize)>)> {
    vec![
        fields!(Header: magic major minor header_size total_size endian_tag features op_off op_stride op_count thr_off
            thr_stride thr_count hist_off hist_stride hist_count generation pid uid start_ticks pid_ns mono0_ns real0_ns
            boot_id rank local_rank world local_world gpu numa version job time_ns),
        fields!(Process: heartbeat state bytes_written bytes_read saves_ok saves_failed loads_ok loads_failed hist_head
            threads_used verifies_ok verifies_failed target_save target_load ops_unslotted),
        fields!(OperationSlot: seq op_id kind phase engine flags fallback_errno threads bytes_total bytes_durable
            files_total files_done t_start_mono_ns t_phase_mono_ns t_end_mono_ns st_dev step block_size queue_depth target
            error label path),
        fields!(ThreadSlot: bytes_ever requests bytes_submitted busy_ns source_wait_ns last_progress_mono_ns in_flight state
            op_slot errors latency_sum_ns latency_max_ns retries shorts tid cpu op_id file limit_wait_ms bytes_op
            latency_hist),
        fields!(Record: op_id kind result engine threads bytes t_start_real_ns dur_ns sync_ns peak_bps p50_us p99_us step
            error flags fallback_errno label path),
    ]
}
