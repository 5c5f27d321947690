"""Forbidden and drawn tokens are those that transformers' own processors leave."""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.parameters import Parameters
from engine.rules import FORBIDDEN, rules_of
from engine.sampling import Sampler
from engine.text.phrases import Phrases
from engine.text.table import BYTES, Table
from tests.oracle import oracle

pytestmark = pytest.mark.oracle

ENDS = [1, 4]
DRAWS = 2000


def processed(cases: list[dict[str, Any]], folder: Path) -> list[Any]:
    """The logits (V,) of each case after transformers' processors."""
    (folder / "cases.json").write_text(json.dumps(cases), encoding="utf-8")
    oracle.run("-m", "tests.oracle.make_processed", folder / "cases.json")
    return [np.load(folder / f"{number}.npy") for number in range(len(cases))]


def logits_of(case: dict[str, Any]) -> Any:
    rng = np.random.default_rng(case["seed"])
    return (case["scale"] * rng.standard_normal(case["size"])).astype(np.float32)


def test_what_is_forbidden_is_what_transformers_forbids(tmp_path: Path) -> None:
    rng = random.Random(1)  # noqa: S311
    cases, options = [], []
    for seed in range(60):
        size = rng.choice((5, 20, 300))
        ids = [rng.randrange(size) for _ in range(rng.randint(1, 120))]
        prompt, ngram, least = rng.randint(1, len(ids)), rng.randint(1, 5), rng.randint(1, 90)
        lists = [[*ids[-n:], rng.randrange(size)] for n in range(1, 4) if n <= len(ids)]
        lists += [[rng.randrange(size) for _ in range(rng.randint(1, 4))] for _ in range(20)]
        lists += [[ENDS[0]], [ENDS[0], 2]]
        new = {"prompt_length_to_skip": prompt, "min_new_tokens": least, "eos_token_id": ENDS}
        bad = {"bad_words_ids": lists, "eos_token_id": ENDS}
        processors = [
            ("RepetitionPenaltyLogitsProcessor", {"penalty": 1.3}),
            ("NoRepeatNGramLogitsProcessor", {"ngram_size": ngram}),
            ("NoBadWordsLogitsProcessor", bad),
            ("MinNewTokensLengthLogitsProcessor", new),
        ]
        case = {"seed": seed, "size": size, "scale": 3.0, "ids": ids, "prompt": prompt}
        cases.append({**case, "processors": processors})
        options.append(
            Parameters(
                repetition_penalty=1.3,
                no_repeat_ngram_size=ngram,
                bad_words_ids=tuple(map(tuple, lists)),
                min_new_tokens=least,
            )
        )

    for case, p, expected in zip(cases, options, processed(cases, tmp_path), strict=True):
        table = Table(BYTES, [b"a"] * case["size"])
        rules = rules_of(p, case["ids"][: case["prompt"]], ENDS, partial(Phrases, table))
        logits = logits_of(case)
        Sampler(p, 0, rules)._adjust(logits, case["ids"])
        np.testing.assert_array_equal(logits == FORBIDDEN, np.isneginf(expected))
        left = logits != FORBIDDEN
        np.testing.assert_allclose(logits[left], expected[left], rtol=1e-6)


class EvenlySpaced:
    """Stands in for the random numbers: one for each small part of [0, 1)."""

    def __init__(self) -> None:
        self._numbers = iter((np.arange(DRAWS) + 0.5) / DRAWS)

    def random(self) -> float:
        return float(next(self._numbers))


def test_what_is_drawn_is_what_transformers_would_draw(tmp_path: Path) -> None:
    """Each token gets its share of evenly spaced numbers, but for one at either end."""
    rng = random.Random(2)  # noqa: S311
    cases, options = [], []
    for seed in range(60):
        chosen: dict[str, Any] = {"temperature": rng.choice((0.5, 1.0, 1.7))}
        processors = [("TemperatureLogitsWarper", {"temperature": chosen["temperature"]})]
        if rng.random() < 0.4:
            chosen["top_k"] = rng.choice((3, 50, 900))
            processors.append(("TopKLogitsWarper", {"top_k": chosen["top_k"]}))
        if rng.random() < 0.4:
            chosen["top_p"] = rng.choice((0.5003, 0.9003))
            processors.append(("TopPLogitsWarper", {"top_p": chosen["top_p"]}))
        if rng.random() < 0.4:
            chosen["min_p"] = rng.choice((0.013, 0.2003))
            processors.append(("MinPLogitsWarper", {"min_p": chosen["min_p"]}))
        if rng.random() < 0.8:
            chosen["typical_p"] = rng.choice((0.2003, 0.5003, 0.9503))
            processors.append(("TypicalLogitsWarper", {"mass": chosen["typical_p"]}))
        case = {"seed": seed, "size": rng.choice((30, 1500)), "scale": rng.choice((0.8, 3.0))}
        cases.append({**case, "ids": [0], "prompt": 1, "processors": processors})
        options.append(Parameters(do_sample=True, seed=1, **chosen))

    for case, p, expected in zip(cases, options, processed(cases, tmp_path), strict=True):
        logits, sampler = logits_of(case), Sampler(p)
        sampler._random = EvenlySpaced()  # type: ignore[assignment]
        drawn = [sampler.choose(logits, [0])[0] for _ in range(DRAWS)]
        weights = np.exp(expected.astype(np.float64) - expected.max())
        shares = DRAWS * weights / weights.sum()
        found = np.bincount(drawn, minlength=len(logits))
        assert np.abs(found - shares).max() <= 1.05, (case, p)
