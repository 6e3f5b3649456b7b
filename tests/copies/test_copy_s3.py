"""``fastckpt.copy`` to an S3 server: checksums, parts, and interrupted copies."""

from __future__ import annotations

import base64
import errno
from pathlib import Path

import numpy as np
import pytest

import fastckpt
from copies.conftest import value_at
from harness import manifest
from harness.s3 import BUCKET

pytest.importorskip("obstore")


def test_a_copy_on_s3_has_the_sums_of_its_files(saved, s3, tmp_path):
    source = saved("a", 1)
    fastckpt.copy(source, f"s3://{BUCKET}/run/a")
    assert value_at(f"s3://{BUCKET}/run/a") == 1
    client, folder = s3.client(), manifest.own_checksum(Path(source))
    for shard in manifest.body_of(Path(source))["shards"]:
        head = client.head_object(Bucket=BUCKET, Key=f"run/a/{folder}/{shard['file']}", ChecksumMode="ENABLED")
        assert head["ContentLength"] == shard["bytes"]
        assert head["Metadata"]["fastckpt-crc64"] == shard["crc"]
        # This is S3's own checksum, if the server supports such checksums.
        own = head.get("ChecksumCRC64NVME")
        assert own is None or base64.b64decode(own).hex() == shard["crc"]
    s3.forget()
    assert fastckpt.copy(source, f"s3://{BUCKET}/run/a").was_there
    assert not [method for method, _, _ in s3.requests if method not in ("GET", "HEAD")]
    fastckpt.copy(f"s3://{BUCKET}/run/a", tmp_path / "back")
    assert value_at(str(tmp_path / "back")) == 1


def test_a_large_shard_goes_in_parts_and_a_refusal_leaves_no_checkpoint(s3, tmp_path):
    source = str(tmp_path / "a")
    fastckpt.save({"w": np.arange(2_500_000.0)}, source)
    url = f"s3://{BUCKET}/large"
    s3.refuse = lambda method, path: "403 Forbidden" if method == "PUT" and "large" in path else None
    with pytest.raises(PermissionError, match="large") as raised:
        fastckpt.copy(source, url)
    assert raised.value.errno == errno.EACCES
    s3.forget()
    with pytest.raises((FileNotFoundError, fastckpt.exceptions.NotACheckpointError)):
        fastckpt.open(url)
    report = fastckpt.copy(source, url)
    files = ("model.safetensors", "model.safetensors.index.json")
    assert report.bytes == sum(Path(source, file).stat().st_size for file in files)
    assert any(method == "POST" for method, _, _ in s3.requests)
    assert fastckpt.verify(url).ok
    # The manifest must be sent last.
    puts = [path for method, path, _ in s3.requests if method in ("PUT", "POST")]
    assert puts[-1].endswith("/large/fastckpt.json")
