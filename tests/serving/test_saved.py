from __future__ import annotations

from pathlib import Path

import pytest

from serving.errors import ServingError
from serving.model import Model
from serving.saved import SavedModels
from serving.store import Cache, StoredModel, public_url
from tests.serving.s3 import settings

SECRET = "X-Amz-Signature=0123abcd"  # noqa: S105
URL = f"https://user:0123abcd@models.example/%EC%8B%9C.tar.gz?{SECRET}#0123abcd"


def model(stored: StoredModel) -> Model:
    return Model("시", public_url(stored.url), "a-1", stored, {"response_timeout": 60})


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        (URL, "https://models.example/%EC%8B%9C.tar.gz"),
        ("http://[::1", "http://[::1"),
        ("ftp://a:b@host?c", "ftp://host"),
        ("s3://bucket/what?.tar.gz", "s3://bucket/what?.tar.gz"),
        ("팀/what?", "팀/what?"),
        ("/opt/ml/model", "/opt/ml/model"),
    ],
)
def test_an_address_is_shown_without_its_keys(url: str, shown: str) -> None:
    assert public_url(url) == shown


def test_a_url_with_a_key_is_not_written_and_its_model_is_found_in_the_cache(
    tmp_path: Path,
) -> None:
    stored = StoredModel("시", URL, "v1", 10, "archive")
    saved = SavedModels(tmp_path)
    saved.write([model(stored)])
    for path in tmp_path.iterdir():
        assert b"0123abcd" not in path.read_bytes()
    (restored,) = saved.read()
    cache = Cache(settings(tmp_path / "cache"))
    with pytest.raises(ServingError) as raised:  # it is not there yet, and cannot be fetched
        cache.acquire(restored.stored)
    assert "0123abcd" not in raised.value.message
    (tmp_path / "cache" / "models" / stored.key).mkdir()
    assert cache.acquire(restored.stored).path == cache.acquire(stored).path
