"""The store that fails on command: what a client of it sees, mode by mode."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
from botocore import exceptions
from botocore.config import Config
from urllib3.exceptions import HTTPError

from testbed.s3 import client
from tests.chaos.store import BUCKET, ENDING, PREFIX, Store, store
from tests.e2e.server import eventually

pytestmark = pytest.mark.slow

MODEL, OLD, NEW = "봄", b"old" * 1000, b"new" * 1000
BROKEN = (exceptions.BotoCoreError, HTTPError, OSError)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with store(tmp_path_factory.mktemp("store") / "moto.log") as running:
        yield running


def read(broken: Store, read_timeout_s: float = 30) -> bytes:
    """One attempt through the proxy."""
    config = Config(retries={"total_max_attempts": 1}, read_timeout=read_timeout_s)
    s3 = client(broken.environment["AWS_ENDPOINT_URL_S3"], config=config)
    with contextlib.closing(s3):
        body = s3.get_object(Bucket=BUCKET, Key=f"{PREFIX}{MODEL}{ENDING}")["Body"]
        with contextlib.closing(body):
            return bytes(body.read())


@pytest.fixture
def broken(started: Store) -> Iterator[Store]:
    """Works again after the test."""
    started.put(MODEL, OLD)
    yield started
    started.mode = ""
    assert read(started) in (OLD, NEW)


@pytest.mark.parametrize(
    ("mode", "error", "message", "timeout_s"),
    [
        ("403", exceptions.ClientError, "AccessDenied", 30),
        ("503", exceptions.ClientError, "SlowDown", 30),
        ("truncate", BROKEN, None, 30),
        ("gone", BROKEN, None, 30),
        ("stall", BROKEN, None, 0.5),
    ],
)
def test_a_download_fails(
    broken: Store, mode: str, error: type[Exception], message: str | None, timeout_s: float
) -> None:
    broken.mode = mode
    with pytest.raises(error, match=message):
        read(broken, timeout_s)


def test_an_object_changes_in_mid_download(broken: Store) -> None:
    changed: list[str] = []

    def change(model: str) -> None:
        changed.append(model)
        broken.put(model, NEW)

    broken.mode, broken.changing = "change", change
    assert read(broken) == OLD
    assert changed == [MODEL]
    broken.mode = ""
    assert read(broken) == NEW


def test_a_stalled_download_ends_with_the_mode(broken: Store) -> None:
    broken.mode = "stall"
    ended = threading.Event()

    def reading() -> None:
        with pytest.raises(BROKEN):
            read(broken)
        ended.set()

    threading.Thread(target=reading).start()
    assert not ended.wait(0.2)
    broken.mode = ""
    eventually(ended.is_set)
