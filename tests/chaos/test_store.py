"""The store that fails on command: what a client of it sees, mode by mode."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from botocore import exceptions
from botocore.config import Config
from urllib3.exceptions import HTTPError

from testbed.s3 import client
from tests.chaos.store import BUCKET, ENDING, PREFIX, Store, store

pytestmark = pytest.mark.slow

MODEL, OLD, NEW = "봄", b"old" * 1000, b"new" * 1000
BROKEN = (exceptions.BotoCoreError, HTTPError, OSError)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with store(tmp_path_factory.mktemp("store") / "moto.log") as running:
        yield running


def read(broken: Store) -> bytes:
    """Read once through the proxy."""
    config = Config(retries={"total_max_attempts": 1}, read_timeout=0.5)
    s3 = client(broken.environment["AWS_ENDPOINT_URL_S3"], config=config)
    with contextlib.closing(s3):
        body = s3.get_object(Bucket=BUCKET, Key=f"{PREFIX}{MODEL}{ENDING}")["Body"]
        with contextlib.closing(body):
            return bytes(body.read())


@pytest.mark.parametrize(
    ("mode", "error", "message"),
    [
        ("403", exceptions.ClientError, "AccessDenied"),
        ("503", exceptions.ClientError, "SlowDown"),
        *((mode, BROKEN, None) for mode in ("truncate", "gone", "stall")),
    ],
)
def test_a_download_fails_until_the_mode_ends(
    started: Store, mode: str, error: type[Exception], message: str | None
) -> None:
    started.put(MODEL, OLD)
    started.mode = mode
    with pytest.raises(error, match=message):
        read(started)
    started.mode = ""
    assert read(started) == OLD


def test_an_object_changes_in_mid_download(started: Store) -> None:
    started.put(MODEL, OLD)
    started.mode, started.changing = "change", lambda model: started.put(model, NEW)
    assert read(started) == OLD
    started.mode = ""
    assert read(started) == NEW
