from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.store.s3 import S3Server, s3_server


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture
def s3(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """An empty S3 server, the one that this process's environment names."""
    server.empty()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    return server
