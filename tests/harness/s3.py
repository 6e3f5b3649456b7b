"""moto's S3 server on the loopback, and the environment variables for it."""

from __future__ import annotations

import logging
import os
import threading

import pytest

BUCKET = "bucket"
#: Prefixes of variables that the environment of the test run may have.
_ENVIRONMENT = ("AWS_", "GOOGLE_", "AZURE_")


class Server:
    """The server, and its requests.

    Attributes:
        url: its endpoint.
        requests: the method, the path and the headers of each request since :meth:`forget`.
        refuse: a function of the method and the path that returns the status of a refusal, or None.
    """

    def __init__(self):
        import moto.server
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self._app = moto.server.DomainDispatcherApplication(moto.server.create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        self._thread = threading.Thread(target=self._server.serve_forever, name="s3", daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.forget()

    def forget(self):
        """Forget all requests, and refuse no more."""
        self.requests = []
        self.refuse = lambda _method, _path: None

    def _answer(self, environ, start):
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        headers = {name[5:].replace("_", "-").lower(): text for name, text in environ.items() if name[:5] == "HTTP_"}
        self.requests.append((method, path, headers))
        status = self.refuse(method, path)
        if status is None:
            return self._app(environ, start)
        # Read the whole request, which the client may still be sending.
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        start(status, [("Content-Type", "application/xml")])
        code = status.split(" ", 1)[1].replace(" ", "")
        return [f"<Error><Code>{code}</Code><Message>as the test says</Message></Error>".encode()]

    def client(self):
        """A client of other authors: boto3's."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key="a secret",
        )

    def close(self):
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def environment(url):
    """The environment variables of a process for an S3 at ``url``."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "a secret",
    }


def lead_to(url, monkeypatch):
    """Set the environment variables for an S3 at ``url``, and remove those of other stores."""
    for name in [name for name in os.environ if name.startswith(_ENVIRONMENT)]:
        monkeypatch.delenv(name)
    for name, text in environment(url).items():
        monkeypatch.setenv(name, text)


@pytest.fixture(scope="session")
def s3_server():
    """The server, for all tests of a process."""
    server = Server()
    yield server
    server.close()


@pytest.fixture
def s3(s3_server, monkeypatch):
    """The server with one empty bucket, ``s3://bucket``, and its environment variables."""
    lead_to(s3_server.url, monkeypatch)
    client = s3_server.client()
    client.create_bucket(Bucket=BUCKET)
    s3_server.forget()
    yield s3_server
    s3_server.forget()
    for page in client.get_paginator("list_objects_v2").paginate(Bucket=BUCKET):
        if keys := [{"Key": one["Key"]} for one in page.get("Contents", [])]:
            client.delete_objects(Bucket=BUCKET, Delete={"Objects": keys})
    client.delete_bucket(Bucket=BUCKET)
    client.close()


def objects(url):
    """The objects below a URL, in S3 or in this process's memory, for tests to read and change."""
    from fastckpt._stores.objects import Objects

    return Objects.at("test", url)


def put(directory, url):
    """Store the files of a directory as objects below ``url``, the manifest last, with their checksums."""
    from fastckpt import _crc64

    there = objects(url)
    files = (path for path in directory.rglob("*") if path.is_file())
    for path in sorted(files, key=lambda path: path.name == "fastckpt.json"):
        content = path.read_bytes()
        there.write(path.relative_to(directory).as_posix(), [content], len(content), _crc64.to_hex(_crc64.of(content)))
    return there
