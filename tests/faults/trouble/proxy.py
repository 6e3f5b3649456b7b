"""A bad network in front of an HTTP server: it loses requests and answers, repeats and delays them, refuses some, and
cuts connections."""

from __future__ import annotations

import contextlib
import http.client
import random
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

#: The faults of a request. If an answer is lost, the server handled the request; the client repeats it.
FAULTS = ("lost", "answer lost", "twice", "throttled", "failed", "cut", "late")
REFUSALS = {"throttled": (503, "SlowDown"), "failed": (500, "InternalError")}
#: More requests than any program sends.
NEVER = 1 << 60
#: The longest delay, in seconds.
LATEST = 0.5
#: Headers of a connection, not of its content.
OWN = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


class Proxy:
    """The network, until :meth:`close`.

    Args:
        url: the address of the server.

    Attributes:
        url: the address of the network.
        came: how often each fault happened.
    """

    def __init__(self, url: str) -> None:
        self.target = urlsplit(url).netloc
        self.came = Counter[str]()
        self._chance, self._left = 0.0, NEVER
        self._draw, self._lock = random.Random(0), threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"proxy": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, name="proxy", daemon=True).start()

    def fail(self, chance: float, seed: float, outage: int = NEVER) -> None:
        """From now on, let each request fail with this probability, drawn by the seed; after ``outage`` requests, let
        no request through."""
        with self._lock:
            self._chance, self._left = chance, outage
            self._draw.seed(seed)

    def fault(self) -> tuple[str, float]:
        """Return the fault of the next request, if any, and a number from 0 to 1."""
        with self._lock:
            self._left -= 1
            if self._left < 0:
                found = self._draw.choice(FAULTS[:2])
            else:
                found = self._draw.choice(FAULTS) if self._draw.random() < self._chance else ""
            self.came[found] += 1
            return found, self._draw.random()

    def close(self) -> None:
        """End it."""
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    proxy: Proxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def handle(self) -> None:
        # The client may disconnect at any time.
        with contextlib.suppress(ConnectionError):
            super().handle()

    def relay(self) -> None:
        """Answer a request, with the faults of the network."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault, place = self.proxy.fault()
        if fault == "lost":
            self.close_connection = True
            return
        if fault in REFUSALS:
            status, code = REFUSALS[fault]
            self.tell(status, {"Content-Type": "application/xml"}, f"<Error><Code>{code}</Code></Error>".encode())
            return
        if fault == "late":
            time.sleep(LATEST * place)
        status, headers, answer = self.forward(body)
        if fault == "twice":
            status, headers, answer = self.forward(body)
        if fault == "answer lost":
            self.close_connection = True
            return
        self.tell(status, headers, answer, int(len(answer) * place) if fault == "cut" else None)

    def forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        """Return the server's answer."""
        connection = http.client.HTTPConnection(self.proxy.target, timeout=60)
        try:
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, text in self.headers.items():
                if name.lower() not in OWN - {"content-length"}:
                    connection.putheader(name, text)
            connection.endheaders(body or None)
            found = connection.getresponse()
            return found.status, dict(found.getheaders()), found.read()
        finally:
            connection.close()

    def tell(self, status: int, headers: dict[str, str], answer: bytes, kept: int | None = None) -> None:
        """Send an answer, or the first bytes of a longer one."""
        self.send_response_only(status)
        for name, text in headers.items():
            if name.lower() not in OWN:
                self.send_header(name, text)
        length = headers.get("Content-Length", len(answer)) if self.command == "HEAD" else len(answer)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(answer[:kept])
        if kept is not None:
            self.wfile.flush()
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = relay  # noqa: N815 - names of the library
