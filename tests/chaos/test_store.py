"""The store that fails on command: what a client of it sees, mode by mode."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import boto3
import pytest
from botocore import exceptions
from botocore.config import Config
from urllib3.exceptions import HTTPError

from tests.chaos.store import BUCKET, ENDING, PREFIX, Store, store
from tests.e2e.server import eventually

pytestmark = pytest.mark.slow

MODEL, OLD, NEW = "봄", b"old" * 1000, b"new" * 1000
BROKEN = (exceptions.BotoCoreError, HTTPError, OSError)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with store(tmp_path_factory.mktemp("store") / "moto.log") as found:
        yield found


def read(kept: Store, read_timeout_s: float = 30) -> bytes:
    """One attempt through the proxy."""
    options = Config(retries={"total_max_attempts": 1}, read_timeout=read_timeout_s)
    client = boto3.client(
        "s3",
        endpoint_url=kept.environment["AWS_ENDPOINT_URL_S3"],
        region_name="us-east-1",
        aws_access_key_id="test",
        aws_secret_access_key="test",  # noqa: S106
        config=options,
    )
    try:
        key = f"{PREFIX}{MODEL}{ENDING}"
        body = client.get_object(Bucket=BUCKET, Key=key)["Body"]
        try:
            data: bytes = body.read()
            return data
        finally:
            body.close()
    finally:
        client.close()


@pytest.fixture(autouse=True)
def fresh(kept: Store) -> Iterator[None]:
    kept.put(MODEL, OLD)
    yield
    kept.mode = ""
    assert read(kept) in (OLD, NEW)


@pytest.mark.parametrize(("mode", "code"), [("403", "AccessDenied"), ("503", "SlowDown")])
def test_it_refuses(kept: Store, mode: str, code: str) -> None:
    kept.mode = mode
    with pytest.raises(exceptions.ClientError, match=code):
        read(kept)


@pytest.mark.parametrize("mode", ["truncate", "gone"])
def test_it_breaks_off(kept: Store, mode: str) -> None:
    kept.mode = mode
    with pytest.raises(BROKEN):
        read(kept)


def test_it_stalls_in_mid_download(kept: Store) -> None:
    kept.mode = "stall"
    with pytest.raises(BROKEN):
        read(kept, 0.5)


def test_it_changes_an_object_in_mid_download(kept: Store) -> None:
    changed: list[str] = []

    def change(model: str) -> None:
        changed.append(model)
        kept.put(model, NEW)

    kept.mode, kept.changing = "change", change
    assert read(kept) == OLD
    assert changed == [MODEL]
    kept.mode = ""
    assert read(kept) == NEW


def test_what_stalls_goes_on_when_the_mode_ends(kept: Store) -> None:
    kept.mode = "stall"
    ended = threading.Event()

    def reading() -> None:
        with pytest.raises(BROKEN):
            read(kept)
        ended.set()

    threading.Thread(target=reading).start()
    assert not ended.wait(0.2)
    kept.mode = ""
    eventually(ended.is_set)
