"""The example commands name an address that a client can use."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.process import examples
from serving.settings import Settings
from tests.serving.store.archives import touch


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("0.0.0.0", "localhost"),
        ("::", "localhost"),
        ("::1", "[::1]"),
        ("10.0.0.7", "10.0.0.7"),
    ],
)
def test_examples_name_an_address_to_connect_to(tmp_path: Path, host: str, address: str) -> None:
    touch(tmp_path, "소월/a.params")
    settings = Settings(host=host, model_store=str(tmp_path), port=8080, management_port=8081)
    commands = examples.text(settings)
    assert f"curl {address}:8081/models\n" in commands
    assert f"curl {address}:8080/predictions/소월 " in commands
