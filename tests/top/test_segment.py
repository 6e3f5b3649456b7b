"""The bytes: the page, the producer and the reader have one layout, and bad bytes raise only BadSegment."""

from __future__ import annotations

import json
from dataclasses import fields as fields_of
from pathlib import Path

import pytest
from fastckpt_top import segment
from fastckpt_top.segment import BadSegment
from hypothesis import given, settings
from hypothesis import strategies as st
from producer import LAYOUT, SIZE, Image

DATA = Path(__file__).parents[1] / "data"


def test_the_reader_has_the_layout_of_the_page():
    numbers = {"H": "u16", "I": "u32", "Q": "u64", "i": "i32", "q": "i64"}

    def on_the_page(code):
        count, letter = code[:-1], code[-1]
        kind = numbers.get(letter) or ("u8" if code == "16s" else "char")
        return f"{kind}[{count}]" if count else kind

    ours = {}
    for table in (segment.Header, segment.Process, segment.Operation, segment.Thread, segment.History):
        places = {one.name: (one.metadata["offset"], on_the_page(one.metadata["code"])) for one in fields_of(table)}
        ours[table.__name__.lower()] = places
    ours["header"]["magic"] = (0, f"u8[{len(segment.MAGIC)}]")
    assert ours == LAYOUT


def test_the_rust_producer_has_the_layout_of_the_page():
    path = DATA / "segment-1.0.json"
    theirs = json.loads(path.read_text())
    names = {
        "Header": "header",
        "Process": "process",
        "OperationSlot": "operation",
        "ThreadSlot": "thread",
        "Record": "history",
    }
    compared = 0
    for name, fields in theirs.items():
        table = names.get(name)
        if table is None:
            continue
        compared += 1
        offsets = {field: offset for field, (offset, _) in LAYOUT[table].items()}
        assert {field: fields[field] for field in offsets} == offsets, table
    assert compared == 5


def test_the_golden_segment_of_layout_1_0_is_read():
    found = segment.decode((DATA / "segment-1.0.seg").read_bytes())
    assert (found.header.major, found.header.minor) == (1, 0)
    assert found.header.version
    assert found.operations
    assert found.threads
    assert found.history
    assert all(op.label.isprintable() for op in found.operations)


def image():
    made = Image(rank=3, gpu=1, job="llama", version="9.8.7")
    made.set("process", 0, heartbeat=5, bytes_written=2**63 + 1, target_save=3 * 10**9)
    made.operation(0, path="/ä/step-7", label="step-7", step=-1, target=4 * 10**9, flags=0b100011, fallback_errno=1)
    made.set("operation", 0, bytes_staged=6, bytes_to_stage=7)
    made.thread(0, bytes_op=123, latency_hist=list(range(16)), cpu=0xFFFFFFFF, fsync_wait_ms=8, peer_wait_ms=9)
    made.thread(63, bytes_op=456)
    made.record(0, error=28, result=2)
    return made


def test_every_field_comes_back():
    found = segment.decode(bytes(image().data))
    assert (found.header.rank, found.header.gpu, found.header.job, found.header.version) == (3, 1, "llama", "9.8.7")
    assert (found.process.heartbeat, found.process.bytes_written, found.process.target_save) == (
        5,
        2**63 + 1,
        3 * 10**9,
    )
    (op,) = found.operations
    assert (op.path, op.label, op.step, op.target, op.flags, op.fallback_errno) == (
        "/ä/step-7",
        "step-7",
        -1,
        4 * 10**9,
        35,
        1,
    )
    assert op.running
    assert (op.bytes_staged, op.bytes_to_stage, op.refused) == (6, 7, ())
    assert [(slot, thread.bytes_op) for slot, thread in found.threads] == [(0, 123), (63, 456)]
    thread = found.threads[0][1]
    assert thread.latency_hist == tuple(range(16))
    assert (thread.fsync_wait_ms, thread.peer_wait_ms) == (8, 9)
    assert (found.history[0].error, found.history[0].result) == (28, 2)


def test_a_slot_that_is_being_written_is_left_out():
    made = image()
    made.set("operation", 0, seq=3)
    assert segment.decode(bytes(made.data)).operations == ()


def test_a_full_string_has_no_terminator_and_a_cut_one_is_no_error():
    made = image()
    made.set("operation", 0, label=b"x" * 64, path=b"/" + "ä".encode() * 160)
    (op,) = segment.decode(bytes(made.data)).operations
    assert op.label == "x" * 64
    # 295 bytes follow the slash, so that the last character is cut in half.
    assert op.path[1:148] == "ä" * 147
    assert len(op.path) == 149
    assert op.path.startswith("/ä")


@pytest.mark.parametrize(
    "raw", [b"\x1b[2J", b"a\nb", "\u202egnp".encode(), b"\xff\xfe", "a\u0301".encode(), b"[bold]x[/]"]
)
def test_foreign_strings_are_made_harmless(raw):
    made = image()
    made.set("operation", 0, label=raw)
    label = segment.decode(bytes(made.data)).operations[0].label
    assert label
    assert not any(char < " " or char in "\x7f\u202e\u0301" for char in label)


HOSTILE = {
    "empty": lambda data: data[:0],
    "short": lambda data: data[:255],
    "magic": lambda data: b"X" + data[1:],
    "big endian": lambda data: data[:20] + data[20:24][::-1] + data[24:],
    "cut": lambda data: data[:0x5000],
    "too large": lambda data: data + bytes(segment.MAX_SIZE),
}
FIELDS = {
    "generation": 0,
    "header_size": 8,
    "total_size": SIZE + 1,
    "op_stride": 8,
    "thr_stride": 250,
    "thr_count": 0xFFFFFFFF,
    "hist_off": 0xFFFFFFF8,
    "hist_stride": 0,
    "op_off": 0x10,
    "op_count": 1 << 31,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_bytes_that_are_no_segment_are_refused(name):
    with pytest.raises(BadSegment):
        segment.decode(HOSTILE[name](bytes(image().data)))


@pytest.mark.parametrize("name", FIELDS)
def test_a_header_that_cannot_be_true_is_refused(name):
    made = image()
    made.set("header", 0, **{name: FIELDS[name]})
    with pytest.raises(BadSegment):
        segment.decode(bytes(made.data))


def test_a_newer_major_version_is_refused_in_words():
    made = image()
    made.set("header", 0, major=2)
    with pytest.raises(BadSegment, match=r"layout 2\.0 needs a newer fastckpt-top"):
        segment.decode(bytes(made.data))


def test_a_newer_minor_version_with_larger_strides_is_read():
    made = image()
    wide = bytearray(0x200 + 7 * 1024 + 64 * 512 + 64 * 512)
    wide[:0x200] = made.data[:0x200]
    operations, threads, history = 0x200, 0x200 + 7 * 1024, 0x200 + 7 * 1024 + 64 * 512
    for start, stride, old, size, count in (
        (operations, 1024, 0x200, 512, 7),
        (threads, 512, 0x1000, 256, 64),
        (history, 512, 0x5000, 256, 64),
    ):
        for index in range(count):
            wide[start + index * stride : start + index * stride + size] = made.data[
                old + index * size : old + (index + 1) * size
            ]
    newer = Image(wide, minor=3, total_size=len(wide), rank=3, gpu=1, job="llama", version="9.8.7")
    newer.set(
        "header",
        0,
        op_off=operations,
        op_stride=1024,
        thr_off=threads,
        thr_stride=512,
        hist_off=history,
        hist_stride=512,
    )
    found, old = segment.decode(bytes(wide)), segment.decode(bytes(made.data))
    assert (found.operations, found.threads, found.history) == (old.operations, old.threads, old.history)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, SIZE - 1), st.integers(0, 255)), max_size=40),
    st.lists(st.tuples(st.integers(0, 0xFF), st.integers(0, 255)), max_size=12),
    st.integers(0, SIZE),
    st.booleans(),
)
def test_no_bytes_do_more_than_badsegment(anywhere, header, length, cut):
    data = image().data
    for at, value in (*anywhere, *header):
        data[at] = value
    try:
        found = segment.decode(bytes(data[:length] if cut else data))
    except BadSegment:
        return
    assert all(op.label.isprintable() for op in found.operations)


def test_the_golden_segment_says_what_the_rust_test_wrote():
    found = segment.decode((DATA / "segment-1.0.seg").read_bytes())
    header = found.header
    assert (header.pid, header.uid, header.rank, header.local_rank, header.world, header.local_world) == (
        4242,
        1000,
        3,
        1,
        16,
        8,
    )
    assert (header.start_ticks, header.numa, header.version, header.job) == (123_456, -1, "0.1.0", "train_gpt.py")
    assert header.boot_id == bytes(range(16)).hex()
    assert found.process.heartbeat == 77
    assert found.process.bytes_written == 5_000_000_000
    (operation,) = found.operations
    assert (operation.bytes_staged, operation.bytes_to_stage) == (9_900_000_000, 9_999_999_000)
    assert operation.refused == ("io_uring",)
    waits = [(t.retries, t.shorts, t.fsync_wait_ms, t.peer_wait_ms) for _, t in found.threads]
    assert waits == [(1, 2, 40, 50), (2, 3, 41, 51)]
    process = found.process
    assert (process.group, process.group_rank, process.group_size, process.waits_for) == (9, 10, 16, 12)
    assert (process.changed_step, process.shares) == (13, {"model": 0.25, "optimizer": 0.0})
    assert (process.warned, process.warning) == (2, "ranks differ in w")
