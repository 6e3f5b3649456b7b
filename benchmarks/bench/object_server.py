"""A read-only server of objects: the files below a directory, served like S3 over HTTP on loopback.

The server answers the requests of a load: an object, a range of an object, and a listing. The server sends from the
page cache with ``sendfile``, so that the client takes most of the time.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection
    from pathlib import Path


def _handler(root: Path) -> type[BaseHTTPRequestHandler]:  # noqa: C901 - one class
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def do_GET(self) -> None:
            url = urlsplit(self.path)
            path = root / unquote(url.path).lstrip("/")
            if path.is_dir():
                self._list(path, parse_qs(url.query).get("prefix", [""])[0])
            elif path.is_file():
                self._send(path)
            else:
                self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

        do_HEAD = do_GET  # noqa: N815 - http.server looks for this name

        def _send(self, path: Path) -> None:
            size = path.stat().st_size
            start, end = 0, size
            asked = self.headers.get("Range")
            if asked:
                first, last = asked.removeprefix("bytes=").split("-")
                start, end = int(first), min(size, int(last) + 1)
            self.send_response(206 if asked else 200)
            self.send_header("Content-Length", str(end - start))
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
            self.send_header("ETag", '"1"')
            self.send_header("Last-Modified", self.date_time_string())
            self.end_headers()
            self.wfile.flush()
            if self.command == "GET":
                with path.open("rb") as file:
                    while start < end:
                        start += os.sendfile(self.connection.fileno(), file.fileno(), start, end - start)

        def _list(self, bucket: Path, prefix: str) -> None:
            when = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
            one = f"<Contents><Key>{{}}</Key><Size>{{}}</Size>{when}</Contents>"
            found = [
                one.format(escape(name), path.stat().st_size)
                for path in sorted(bucket.rglob("*"))
                if path.is_file() and (name := str(path.relative_to(bucket))).startswith(prefix)
            ]
            self._answer(200, f"<ListBucketResult>{''.join(found)}</ListBucketResult>".encode())

        def _answer(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _serve(root: Path, ready: Connection) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(root))
    server.daemon_threads = True
    ready.send(server.server_port)
    server.serve_forever()


@contextmanager
def served(root: Path) -> Iterator[str]:
    """Serve the directories below ``root`` as buckets, from a separate process; yield the endpoint."""
    context = multiprocessing.get_context("spawn")
    ready, there = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(root, there), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ready.recv()}"
    finally:
        process.terminate()
        process.join()
