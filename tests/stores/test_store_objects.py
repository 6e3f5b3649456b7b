"""The objects below a URL, in memory and on an S3 server."""

from __future__ import annotations

import base64
import errno
import multiprocessing
import os
import random
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import obstore
import pytest

from fastckpt import _crc64
from fastckpt._paths import is_url
from fastckpt._stores import objects as module
from fastckpt._stores.objects import PART, Objects
from fastckpt._stores.urls import place_of
from harness import s3 as harness

DATA = random.Random(3).randbytes(2 * PART + 5)


@pytest.fixture(params=["memory", "s3"])
def objects(request):
    if request.param == "s3":
        request.getfixturevalue("s3")
        return Objects.at("test", "s3://bucket/a/bb")
    return Objects.at("test", f"memory://{uuid.uuid4()}/a/bb")


def crc(data):
    return _crc64.to_hex(_crc64.of(data))


def test_what_is_written_is_there(objects):
    assert objects.children() == ([], {})
    assert objects.sizes() == {}
    objects.write("small", [DATA[:3], b"", memoryview(DATA)[3:10]], 10, crc(DATA[:10]))
    objects.write("empty", [], 0, None)
    chunks = (DATA[at : at + 3_000_000] for at in range(0, len(DATA), 3_000_000))
    objects.below("deep").write("er/large", chunks, len(DATA), crc(DATA))
    assert objects.children() == (["deep"], {"empty": 0, "small": 10})
    assert objects.below("deep").children() == (["er"], {})
    assert objects.sizes() == {"deep/er/large": len(DATA), "empty": 0, "small": 10}
    # A URL that only begins with the same characters is not below.
    assert Objects.at("test", objects.url[:-1]).sizes() == {}
    assert objects.size("small") == 10
    assert objects.sum_of("deep/er/large") == crc(DATA)
    assert objects.sum_of("empty") is None
    assert bytes(objects.read("small", 0, 10)) == DATA[:10]
    assert bytes(objects.read("small", 8, 9)) == DATA[8:10]
    assert not len(objects.read("small", 10, 5))
    assert not len(objects.read("small", 11, 5))
    assert objects.read_all("small", 10) == DATA[:10]
    memory = bytearray(len(DATA) - 1)
    view = memoryview(memory)
    objects.read_into("deep/er/large", [(PART + 7, view[PART + 6 :]), (1, view[: PART + 6])])
    assert memory == DATA[1:]
    objects.write("small", [b"new"], 3, None)
    assert objects.read_all("small", 3) == b"new"
    objects.remove(["small", "deep/er/large", "never was"])
    assert objects.sizes() == {"empty": 0}
    objects.remove([])


def test_what_is_not_there(objects):
    objects.write("x", [b"1"], 1, None)
    calls = objects.size, objects.sum_of, lambda name: objects.read(name, 0, 1), lambda name: objects.read_all(name, 9)
    for call in calls:
        with pytest.raises(FileNotFoundError, match=f"`{objects.url}/nothing`"):
            call("nothing")
    with pytest.raises(OSError, match=f"cannot read `{objects.url}/x`: it ends at byte 1") as caught:
        objects.read_into("x", [(0, memoryview(bytearray(2)))])
    assert caught.value.errno == errno.EIO
    with pytest.raises(OSError, match="1 bytes are more than the 0 allowed") as caught:
        objects.read_all("x", 0)
    assert caught.value.errno == errno.EFBIG


@pytest.mark.parametrize("size", [10, len(DATA)])
def test_only_what_is_whole_becomes_visible(objects, size):
    def failing():
        yield DATA[: size - 1]
        raise KeyError("the source")

    with pytest.raises(KeyError, match="the source"):
        objects.write("x", failing(), size, None)
    with pytest.raises(ValueError, match=f"there are {size - 1} bytes, and {size} were announced"):
        objects.write("x", [DATA[: size - 1]], size, None)
    with pytest.raises(ValueError, match=f"more than the {size} bytes"):
        objects.write("x", [DATA[:size], b"1"], size, None)
    assert objects.sizes() == {}


@pytest.fixture(params=[True, False])
def knows_conditions(request, objects, monkeypatch):
    """Stores with conditional writes, and stores that refuse them."""
    if request.param:
        return
    if objects.url.startswith("s3"):
        s3 = request.getfixturevalue("s3")
        conditions = {"if-match", "if-none-match"}
        s3.refuse = lambda *_: "501 Not Implemented" if conditions & s3.requests[-1][2].keys() else None
        monkeypatch.setattr(module, "_RETRY", {**module._RETRY, "max_retries": 0})
        objects._store = Objects.at("test", objects.url)._store
        return
    put = obstore.put

    def plain(*arguments, mode="overwrite", **options):
        if mode != "overwrite":
            raise NotImplementedError("conditions")
        return put(*arguments, **options)

    monkeypatch.setattr(obstore, "put", plain)


@pytest.mark.usefixtures("knows_conditions")
def test_an_object_is_replaced_only_as_it_was_seen(objects):
    """Mutants: the write has no condition; a store without conditions is not checked before the write."""
    objects.replace("x", b"one", crc(b"one"), None)
    assert objects.sum_of("x") == crc(b"one")
    seen = objects.read_version("x", 9)
    assert seen.content == b"one"
    with pytest.raises(FileExistsError, match=f"cannot write `{objects.url}/x`: it was replaced or removed meanwhile"):
        objects.replace("x", b"two", crc(b"two"), None)
    objects.replace("x", b"three", crc(b"three"), seen)
    with pytest.raises(FileExistsError, match="meanwhile"):
        objects.replace("x", b"four", crc(b"four"), seen)
    assert objects.read_all("x", 9) == b"three"
    assert objects.sum_of("x") == crc(b"three")
    seen = objects.read_version("x", 9)
    objects.remove(["x"])
    with pytest.raises(FileExistsError, match="meanwhile"):
        objects.replace("x", b"four", crc(b"four"), seen)
    assert objects.sizes() == {}


def test_memory_is_one_store_for_each_name():
    one = Objects.at("test", "memory://name-1/x")
    one.write("y", [b"1"], 1, None)
    assert Objects.at("test", "memory://name-1").sizes() == {"x/y": 1}
    assert Objects.at("test", "memory://name-2").sizes() == {}
    one.remove(["y"])


def test_s3_is_given_the_sums(s3):
    """S3 gets the CRC-64/NVME of an object, or of each of its parts, as the base64 of eight bytes."""
    objects = Objects.at("test", "s3://bucket/a")
    objects.write("small", [DATA[:1000]], 1000, crc(DATA[:1000]))
    objects.write("large", [DATA], len(DATA), crc(DATA))
    sent = [
        int.from_bytes(base64.b64decode(headers["x-amz-checksum-crc64nvme"]), "big")
        for method, path, headers in s3.requests
        if method == "PUT"
    ]
    assert sent[0] == _crc64.of(DATA[:1000])
    # Parts are sent concurrently, in any order.
    assert sorted(sent[1:]) == sorted(_crc64.of(DATA[at : at + PART]) for at in range(0, len(DATA), PART))
    about = s3.client().head_object(Bucket=harness.BUCKET, Key="a/large")
    assert about["Metadata"] == {"fastckpt-crc64": crc(DATA)}


def test_an_upload_that_fails_leaves_no_parts(s3):
    def failing():
        yield DATA
        raise KeyError("the source")

    with pytest.raises(KeyError):
        Objects.at("test", "s3://bucket/a").write("x", failing(), len(DATA) + 1, None)
    assert "Uploads" not in s3.client().list_multipart_uploads(Bucket=harness.BUCKET)


def test_an_object_has_at_most_as_many_parts_as_s3_allows(monkeypatch):
    monkeypatch.setattr(module, "PART", 100)
    monkeypatch.setattr(module, "WHOLE", 200)
    monkeypatch.setattr(module, "_MOST_PARTS", 7)
    made = []
    monkeypatch.setattr("obstore.put", lambda _, __, pieces, **options: made.append(([*pieces], options["chunk_size"])))
    Objects.at("test", "memory://x/y").write("z", [DATA[:1500]], 1500, None)
    ((pieces, size),) = made
    assert len(pieces) <= 7
    assert {len(piece) for piece in pieces[:-1]} == {size}
    assert b"".join(pieces) == DATA[:1500]


def test_more_objects_than_a_page_of_a_listing(s3, monkeypatch):
    objects = Objects.at("test", "s3://bucket/many")
    for number in range(23):
        objects.write(f"{number:04}/x" if number % 2 else f"{number:04}", [b"1"], 1, None)
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "10")
    s3.forget()
    folders, here = objects.children()
    assert (len(folders), len(here)) == (11, 12)
    assert len(objects.sizes()) == 23
    assert len([path for method, path, _ in s3.requests if method == "GET"]) == 6
    objects.remove(objects.sizes())
    assert objects.sizes() == {}


def test_what_the_store_refuses(s3):
    objects = Objects.at("test", "s3://bucket/a")
    s3.refuse = lambda *_: "403 Access Denied"
    for call in (
        objects.children,
        objects.sizes,
        lambda: objects.size("x"),
        lambda: objects.read("x", 0, 1),
        lambda: objects.write("x", [b"1"], 1, None),
        lambda: objects.remove(["x"]),
    ):
        with pytest.raises(PermissionError, match=r"cannot \w+.* `s3://bucket/a") as caught:
            call()
        assert "a secret" not in str(caught.value)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__  # the hidden context may hold signatures
    assert len(s3.requests) == 6


def test_a_server_that_fails_for_a_moment_is_asked_again(s3):
    objects = Objects.at("test", "s3://bucket/a")
    answers = iter(["500 Internal Error", "503 Slow Down"])
    s3.refuse = lambda *_: next(answers, None)
    objects.write("x", [b"1"], 1, None)
    assert objects.sizes() == {"x": 1}
    assert len(s3.requests) == 4


def test_a_bucket_that_is_not_there(s3):
    for call in (lambda at: at.sizes(), lambda at: at.children(), lambda at: at.write("x", [b"1"], 1, None)):
        with pytest.raises(FileNotFoundError, match="`s3://nothing/x"):
            call(Objects.at("test", "s3://nothing/x"))


def test_nobody_answers(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        harness.lead_to(url, monkeypatch)
        began = time.monotonic()
        with pytest.raises(OSError, match=url):
            Objects.at("test", "s3://bucket/a").sizes()
        # The limit suits a busy machine, too: a client that retries takes minutes.
        assert time.monotonic() - began < 60


def test_the_environment_says_how_to_connect(s3, monkeypatch):
    """Mutant: fastckpt passes options of its own, so that the client ignores the environment."""
    monkeypatch.setenv("AWS_USER_AGENT", "a test")
    Objects.at("test", "s3://bucket/a").sizes()
    assert [headers["user-agent"] for _, _, headers in s3.requests] == ["a test"]
    monkeypatch.setenv("AWS_PROXY_URL", "http://somebody:hidden@127.0.0.1:1")
    with pytest.raises(OSError, match="error sending request") as caught:
        Objects.at("test", "s3://bucket/a").sizes()
    assert "hidden" not in str(caught.value)
    monkeypatch.setenv("AWS_READ_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="soon"):
        Objects.at("test", "s3://bucket/a")


def test_the_password_of_an_endpoint_is_not_shown(monkeypatch):
    harness.lead_to("http://somebody:hidden@127.0.0.1:1", monkeypatch)
    with pytest.raises(OSError, match=r"http://127\.0\.0\.1:1/bucket") as caught:
        Objects.at("test", "s3://bucket/a").read("x", 0, 1)
    assert "hidden" not in str(caught.value)


def test_the_environment_says_too_little(monkeypatch):
    harness.lead_to("http://127.0.0.1:1", monkeypatch)
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(ValueError, match=r"load: cannot use 's3://bucket/a': .*SecretAccessKey"):
        Objects.at("load", "s3://bucket/a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
    monkeypatch.delenv("AWS_ALLOW_HTTP")
    with pytest.raises(OSError, match="AWS_ALLOW_HTTP=true"):
        Objects.at("load", "s3://bucket/a").sizes()
    with pytest.raises(ValueError, match="Account"):
        Objects.at("load", "az://container/a")


def test_signatures_are_not_shown():
    error = ValueError("GET https://a.blob.core.windows.net/c/k?sv=1&sig=hunter2 failed\n\nDebug source:\nsig")
    text = module._said(error)
    assert text == "GET https://a.blob.core.windows.net/c/k failed"


def test_azure_and_google_are_made_from_their_environment(monkeypatch):
    harness.lead_to("http://127.0.0.1:1", monkeypatch)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "name")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"key").decode())
    assert Objects.at("test", "az://container/a")._note.isidentifier()
    monkeypatch.setenv("GOOGLE_SKIP_SIGNATURE", "true")
    Objects.at("test", "gs://bucket/a")


def _in_child(objects, answers):
    try:
        objects.sizes()
    except RuntimeError as error:
        answers.put(str(error))
    else:
        answers.put("it worked")
    # Skip pytest's work at the end of a process.
    answers.close()
    answers.join_thread()
    os._exit(0)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_is_told(objects):
    """A forked child lacks the client's threads, and would wait forever without the error."""
    objects.sizes()
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    child = context.Process(target=_in_child, args=(objects, answers))
    child.start()
    assert "forked" in answers.get(timeout=60)
    child.join(60)
    assert child.exitcode == 0


# --- what is a URL ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("s3://bucket/run/step-1", "s3://bucket/run/step-1"),
        ("S3://bucket/run//", "s3://bucket/run"),
        (b"gs://bucket", "gs://bucket"),
        (Path("s3://bucket/run"), "s3://bucket/run"),
        ("az://container/a b%2F", "az://container/a b%2F"),
        ("memory://name/x", "memory://name/x"),
        ("file:///tmp/a%20b/", "/tmp/a b"),
        ("file:/tmp/a", "/tmp/a"),
        ("file://localhost/tmp/../x", "/x"),
        ("/a/s3://b", "/a/s3:/b"),
        ("C:/x", os.path.abspath("C:/x")),  # noqa: PTH100
    ],
)
def test_places(given, place):
    assert place_of("load", given) == place


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("hdfs://node:8020/x", "a store that fastckpt supports: give one of s3://, gs://, az://, memory://, file://"),
        ("https://bucket.s3.amazonaws.com/x", "not a URL of a store"),
        ("s3://", "does not name a place"),
        ("s3://bucket/a//b", "does not name a place"),
        ("s3://bucket/../b", "does not name a place"),
        ("memory:///x/./y", "does not name a place"),
        ("file://host/x", "another machine"),
        ("", "empty"),
        ("s3://bucket/\0", "null"),
    ],
)
def test_what_is_no_place(given, why):
    with pytest.raises(ValueError, match=why):
        place_of("load", given)


def test_a_colon_makes_no_url():
    assert not is_url("/x:/y")


def test_the_client_is_imported_where_a_url_is_given():
    code = """
import sys, fastckpt
assert not {"obstore", "fastckpt._portable", "fastckpt._stores.files", "fastckpt._stores.objects"} & set(sys.modules)
sys.modules["obstore"] = sys.modules["obstore.store"] = None
for call in (fastckpt.load, fastckpt.open, fastckpt.verify, fastckpt.list, fastckpt.remove):
    try:
        call("memory://x/y")
    except ImportError as error:
        assert 'pip install "fastckpt-io[remote]"' in str(error), error
        assert str(error).startswith(call.__name__), error
    else:
        raise AssertionError(call)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
