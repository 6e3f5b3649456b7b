"""Recognition and normalisation of URLs."""

from __future__ import annotations

import pytest

import fastckpt


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


def test_what_takes_no_url_says_what_to_do():
    for call in (lambda url: fastckpt.save({}, url), lambda url: fastckpt.save({}, "x", base=url)):
        with pytest.raises(ValueError, match=r"fastckpt.copy and Manager\(..., remote=\) copy to a URL"):
            call("s3://bucket/x")
    with pytest.raises(ValueError, match=r"mmap=True.*fastckpt.copy"):
        fastckpt.load("memory://bucket/x", io=fastckpt.IO(mmap=True))
