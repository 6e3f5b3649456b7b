"""Downloads of :mod:`harness.roots`: failures are retried, and finally reported with the URL."""

import hashlib
import http.server
import threading

import pytest

from harness import roots

CONTENT = b"package"
DIGEST = hashlib.sha256(CONTENT).hexdigest()


@pytest.fixture
def archive(monkeypatch):
    """A server with a list of replies, and its requests."""
    answers, asked = [], []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            status, content, length = answers.pop(0)
            self.send_response(status)
            self.send_header("Content-Length", str(length))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setattr(roots, "ARCHIVE", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setattr(roots, "PAUSES", (0, 0, 0, 0))
        yield answers, asked
        server.shutdown()
        thread.join()


def test_a_download_that_fails_is_repeated(archive, tmp_path):
    answers, asked = archive
    # The replies are an error, a truncated reply, other content, and the file.
    answers += [(503, b"", 0), (200, CONTENT[:3], 7), (200, b"another", 7), (200, CONTENT, 7)]
    file = roots._fetch(DIGEST, "pool/a%2b1.deb", tmp_path)
    assert (file.name, file.read_bytes()) == ("a+1.deb", CONTENT)
    assert len(asked) == 4


def test_a_download_that_goes_on_failing_names_its_address(archive, tmp_path):
    answers, asked = archive
    answers += [(503, b"", 0)] * 4
    with pytest.raises(RuntimeError, match=r"http://127\.0\.0\.1:\d+/pool/a\.deb, tried 4 times: HTTPError: .*503"):
        roots._fetch(DIGEST, "pool/a.deb", tmp_path)
    answers += [(200, b"another", 7)] * 4
    with pytest.raises(RuntimeError, match=r"pool/a\.deb, tried 4 times: 7 bytes that do not have the SHA-256"):
        roots._fetch(DIGEST, "pool/a.deb", tmp_path)
    assert len(asked) == 8
    assert list(tmp_path.iterdir()) == []
