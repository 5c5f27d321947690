"""Greedy answers that are held to a form are those of transformers with a logits processor that
allows what a partial match of a regular expression does."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.settings import Settings
from tests.engine.engines import Request
from tests.engine.hugging_face import EOS, make_hugging_face
from tests.oracle import oracle

pytestmark = pytest.mark.oracle

PROMPTS = ("안녕하세요. 오늘은", "고양이가 창가에", "The quick 갈색 여우")
NEW = 40
LABELS = ["긍정", "부정", "중립", "긍정적이지 않다"]
SCHEMA = {
    "type": "object",
    "properties": {
        "감정": {"enum": ["긍정", "부정"]},
        "확실": {"type": "boolean"},
        "수": {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["감정", "확실", "수"],
    "additionalProperties": False,
}
NUMBERS = r"\[(1|22|333)(, ?(1|22|333)){0,2}\]"
OBJECT = rf'\{{"감정": ?"(긍정|부정)", ?"확실": ?(true|false), ?"수": ?{NUMBERS}\}}'
# What is asked for, and the same as an expression: the second with the space that may come first.
FORMS: list[tuple[dict[str, Any], str]] = [
    ({"choice": LABELS}, f" ?({'|'.join(LABELS)})"),
    ({"regex": "[가나다라마 ]{3,12}[.!]"}, "[가나다라마 ]{3,12}[.!]"),
    ({"regex": r"\d{2,4}-\d{4}"}, "[0-9]{2,4}-[0-9]{4}"),
    ({"regex": "(산에는 꽃 피네|갈 봄 여름 없이)+"}, "(산에는 꽃 피네|갈 봄 여름 없이)+"),
    ({"json_schema": SCHEMA}, f" ?{OBJECT}"),
]


def test_greedy_answers_are_those_of_transformers_with_a_logits_processor(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "model", kind="byte-level", seed=4)
    with closing(Engine(Settings(memory_mib=64, precision="fp32"))) as engine:
        table = engine.load("m", str(folder)).texts._table
        asked = [
            {"prompt": prompt, "pattern": pattern, "max_new_tokens": NEW, "form": form}
            for prompt in PROMPTS
            for form, pattern in FORMS
        ]
        for one in asked:
            letters = set(str(one["pattern"]) + "0123456789" + "".join(LABELS))
            one["alphabet"] = "".join(sorted(letters))
        pieces = [b"" if table.is_silent(i) else table.piece(i) for i in range(len(table))]
        given = {"answers": asked, "pieces": [piece.hex() for piece in pieces], "eos": EOS}
        answers = oracle.run("-m", "tests.oracle.make_forms", folder, stdin=json.dumps(given))
        for one, expected in zip(asked, json.loads(answers), strict=True):
            form: Any = one["form"]
            request = Request(engine, "m", str(one["prompt"]), max_new_tokens=NEW, **form).wait()
            assert request.ids() == expected, one
