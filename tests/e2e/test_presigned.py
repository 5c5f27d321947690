"""A pre-signed url: what signs it is nowhere but in the gateway's memory."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.e2e.server import Server
from tests.e2e.stores import FAST, SHORT, packed, serving, small, text

pytestmark = pytest.mark.slow

SIGNATURE = "X-Amz-Signature=0123456789abcdef"


class Bucket(ThreadingHTTPServer):
    """Gives `archive` to whoever has the signature, while `is_open`."""

    archive = b""
    is_open = True

    def handle_error(self, *arguments: object) -> None:
        """Clients may hang up: that is how one asks for the beginning only."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        assert isinstance(self.server, Bucket)
        allowed = self.server.is_open and self.path.endswith(f"?{SIGNATURE}")
        data = self.server.archive if allowed else b""
        self.send_response(200 if allowed else 403)
        self.send_header("ETag", '"v1"')
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Bucket]:
    with Bucket(("127.0.0.1", 0), Handler) as bucket:
        bucket.archive = packed(small(tmp_path / "시"), tmp_path / "시.tar.gz").read_bytes()
        thread = threading.Thread(target=bucket.serve_forever)
        thread.start()
        yield bucket
        bucket.shutdown()
        thread.join()


def written(server: Server) -> list[Path]:
    """The files of the server that have the signature in them."""
    found = []
    for path in (*server.run_dir.rglob("*"), server.log):
        with contextlib.suppress(FileNotFoundError):  # the server removes what MMS leaves
            if path.is_file() and SIGNATURE.encode() in path.read_bytes():
                found.append(path)
    return found


def test_a_signature_is_shown_and_written_nowhere_and_the_model_outlives_its_gateway(
    bucket: Bucket, tmp_path: Path
) -> None:
    host = f"127.0.0.1:{bucket.server_port}"
    (tmp_path / "store").mkdir()
    with serving(tmp_path / "server", tmp_path / "store", **FAST, HTTPS_HOSTS=host) as server:
        url = f"http://{host}/시.tar.gz"
        refused = server.load("시", f"{url}?X-Amz-Signature=wrong")
        assert refused.status_code == 403
        assert "wrong" not in refused.text
        assert server.load("시", f"{url}?{SIGNATURE}").status_code == 200
        before = text(server.predict("시", SHORT))
        for path in ("/models", "/models/시"):
            shown = server.get(path).text
            assert url in shown
            assert "Signature" not in shown
        assert written(server) == []
        bucket.is_open = False
        server.kill_gateway()
        assert text(server.predict("시", SHORT)) == before
        assert written(server) == []
