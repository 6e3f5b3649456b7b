"""What is a URL, and what it becomes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import fastckpt
from fastckpt._stores.urls import place_of


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
        ("/x:/y", "/x:/y"),
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


def test_credentials_in_a_url_are_refused_and_not_repeated():
    with pytest.raises(ValueError, match="environment") as caught:
        fastckpt.load("s3://key:hunter2@bucket/x")
    assert "hunter2" not in str(caught.value)


def test_a_file_url_is_a_path(tmp_path):
    path = tmp_path / "a b"
    fastckpt.save({"n": 1}, path)
    url = f"file://{tmp_path}/a%20b"
    assert fastckpt.load(url) == {"n": 1}
    assert fastckpt.verify(url).path == str(path)
    assert [one.path for one in fastckpt.list(f"file://{tmp_path}")] == [str(path)]
    fastckpt.remove(url)
    assert not path.exists()


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


def test_what_takes_no_url_says_what_to_do():
    for call in (lambda url: fastckpt.save({}, url), lambda url: fastckpt.save({}, "x", base=url)):
        with pytest.raises(ValueError, match=r"fastckpt.copy or Manager\(..., remote=\)"):
            call("s3://bucket/x")
    with pytest.raises(ValueError, match=r"mmap=True.*fastckpt.copy"):
        fastckpt.load("memory://bucket/x", mmap=True)
