"""Any files of a tokenizer give texts or an error of ours. Those of sentencepiece: `tests/fuzz`."""

from __future__ import annotations

import base64
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from common.errors import ArtifactError
from engine.sandbox import Limits, Sandbox
from tests.engine.hugging_face import KINDS, train_tokenizer
from tests.engine.text.targets import attempts

pytestmark = pytest.mark.slow

WIDE_S = 60.0
KNOWN = {"used", "ArtifactError", "InvalidRequest", "PromptTooLong", "EngineError", "ended"}
CASES = settings(max_examples=700, suppress_health_check=list(HealthCheck))

ODD: list[Any] = [
    *(None, True, False, 0, -1, 5, 1e308, 2**70, "", "가", "\ud800", "<s>", [], {}, [[]], [None]),
    *({"type": t} for t in ("BPE", "Unigram", "WordLevel", "WordPiece", "Replace", "Precompiled")),
    {"type": "Replace", "pattern": {"String": ""}, "content": "aa"},
    {"type": "Replace", "pattern": {"Regex": "(a*)*$"}, "content": ""},
    {"type": "Split", "pattern": {"Regex": "(a|aa)+$"}, "behavior": "Isolated", "invert": False},
    {"type": "Prepend", "prepend": "x" * 10_000},
    {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(b"\xff" * 40).decode()},
    {"type": "Sequence", "normalizers": [], "pretokenizers": [], "processors": [], "decoders": []},
    {"type": "ByteFallback"},
    {"type": "Strip", "content": "가", "start": 2**40, "stop": 2**40},
    {"type": "CTC", "pad_token": "", "word_delimiter_token": "", "cleanup": True},
    {"content": "<s>", "special": True, "id": 2**31},
]


def changed(value: Any, rng: random.Random, odd: Any) -> Any:
    """The value with one part of it replaced, left out or doubled."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        if rng.random() < 0.1:
            return {k: v for k, v in value.items() if k != key}
        return {**value, key: changed(value[key], rng, odd)}
    if isinstance(value, list) and value and rng.random() < 0.9:
        at = rng.randrange(len(value))
        if rng.random() < 0.1:
            return value + value[at:]
        return [*value[:at], changed(value[at], rng, odd), *value[at + 1 :]]
    return odd


class Tries:
    """A process that tries one file after the other, replaced where it ends."""

    def __init__(self) -> None:
        self._child: Sandbox | None = None
        self.outcomes: Counter[str] = Counter()

    def __call__(self, path: Path) -> None:
        if self._child is None or not self._child.alive:
            self._child = Sandbox(attempts, what=path.name, limits=Limits(256))
            self._child.ready(WIDE_S)
        try:
            outcome = self._child.call(str(path), timeout_s=WIDE_S)
        except ArtifactError as error:  # it crashed, took too long or too much
            ended = not self._child.alive or "MiB" in error.message
            outcome = "ended" if ended else error.message
        assert outcome in KNOWN
        self.outcomes[outcome] += 1

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()


SETTINGS = {
    "bos_token": {"content": "<s>", "lstrip": False},
    "eos_token": "</s>",
    "extra_special_tokens": ["<a>", {"content": "<b>", "special": False}],
    "additional_special_tokens": {"x": "<c>"},
    "added_tokens_decoder": {"9": {"content": "<d>", "normalized": True}, "10": "<e>"},
}


@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_any_tokenizer_and_its_settings_are_used_or_refused(tmp_path: Path, file: str) -> None:
    known = [SETTINGS]
    if file == "tokenizer.json":
        known = [json.loads(train_tokenizer(kind).to_str()) for kind in KINDS]
    tries, path = Tries(), tmp_path / "tokenizer.json"
    train_tokenizer("metaspace").save(str(path))

    @CASES
    @given(st.sampled_from(known), st.randoms(use_true_random=False), st.sampled_from(ODD))
    def attempt(value: Any, rng: random.Random, odd: Any) -> None:
        path.with_name(file).write_text(json.dumps(changed(value, rng, odd)))
        tries(path)

    attempt()
    tries.close()
    assert tries.outcomes["used"] > 10
    assert tries.outcomes["ArtifactError"] > 10
