"""Settings of one model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from serving.errors import BadRequest
from serving.models.model_settings import ModelSettings

ALL: dict[str, Any] = {
    "pinned": True,
    "backend": "native",
    "precision": "int8",
    "max_rows": 4,
    "queue": 0,
    "timeout_s": 2.5,
    "idle_unload_s": 600,
}


def test_all_are_taken_from_json_and_from_a_query() -> None:
    assert ModelSettings.parse(ALL).values() == ALL
    texts = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in ALL.items()
    }
    assert ModelSettings.parse(texts).values() == ALL


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("pinned", 1), ("pinned", "yes"), ("pinned", None), ("backend", "torch"),
        ("backend", ["mxnet"]),
        ("precision", "int4"), ("precision", {}), ("max_rows", 0), ("max_rows", 1.5),
        ("max_rows", True), ("max_rows", "9" * 5000), ("queue", -1), ("queue", "x"),
        ("timeout_s", 0), ("timeout_s", float("nan")), ("timeout_s", float("inf")),
        ("timeout_s", "[" * 9000), ("idle_unload_s", "하루"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_with_what_is_right(name: str, value: Any) -> None:
    with pytest.raises(BadRequest, match=f"^{name} must be ") as refused:
        ModelSettings.parse({name: value})
    assert len(refused.value.message) < 200


def test_an_unknown_one_is_named_with_those_that_are_known() -> None:
    with pytest.raises(
        BadRequest, match="고정 is not known; known are backend, base, idle_unload_s, max"
    ):
        ModelSettings.parse({"고정": True})


def test_a_requests_own_beat_the_files() -> None:
    of_file = ModelSettings(pinned=True, queue=9)
    assert ModelSettings(pinned=False).over(of_file) == ModelSettings(pinned=False, queue=9)


def test_a_models_file_is_read_if_there_is_one(tmp_path: Path) -> None:
    file = tmp_path / "serving.json"
    assert ModelSettings.read(tmp_path) == ModelSettings()
    file.write_text(json.dumps(ALL))
    assert ModelSettings.read(tmp_path).values() == ALL
    for wrong in ("", "{", "[]", "[" * 60_000, '{"queue": "\\ud800"}'):
        file.write_text(wrong)
        with pytest.raises(BadRequest, match=r"serving.json"):
            ModelSettings.read(tmp_path)
    file.unlink()
    os.mkfifo(file)
    assert ModelSettings.read(tmp_path) == ModelSettings()
