"""Forms of answers, compiled as by the engine: in processes with limits of time and memory."""

from __future__ import annotations

import atexit
import json
from functools import cache

import numpy as np

from common.errors import InvalidRequest
from common.form import CHECKS, Form
from common.json_body import read_json
from engine.text.constraint import Vocabulary
from engine.text.table import BYTES
from serving.errors import BadRequest
from tests.engine.text.test_constraint import END, HOSTILE, advance, constrain, table_of

TOKENS = 10  # of an answer
BYTE_TOKENS = 259  # and control tokens, before the words
GOOD = (
    Form("choice", ("긍정", "부정")),
    Form("regex", ("[가-힣]{2,5}( [가-힣]+)*[.!?]",)),
    Form("grammar", ('root ::= "긍정" | "부정" ws "입니다"\nws ::= " "?',)),
    Form("grammar", ('start: name ("," name)*\nname: /[가-힣]+/\n%ignore " "',)),
    Form(
        "json_schema",
        (
            json.dumps(
                {
                    "type": "object",
                    "properties": {
                        "이름": {"type": "string", "pattern": "^[가-힣]+$", "maxLength": 9},
                        "나이": {"type": "integer", "minimum": 0, "maximum": 150},
                        "시": {"type": "array", "items": {"$ref": "#/$defs/시"}, "maxItems": 3},
                    },
                    "required": ["이름"],
                    "$defs": {"시": {"anyOf": [{"enum": ["진달래꽃", "서시"]}, {"type": "null"}]}},
                },
                ensure_ascii=False,
            ),
        ),
    ),
)


def seeds() -> list[bytes]:
    """Requests with one form each, by its kind."""
    forms = [*GOOD, *HOSTILE.values()]
    return [
        json.dumps(
            {form.kind: list(form.source) if form.kind == "choice" else form.source[0]},
            ensure_ascii=False,
        ).encode()
        for form in forms
    ]


@cache
def vocabulary() -> Vocabulary:
    made = Vocabulary(table_of(BYTES), [END])
    atexit.register(made.end)
    return made


def target(data: bytes) -> None:
    """Compile a form, and write the first tokens of an answer."""
    value = read_json(data)
    if not isinstance(value, dict) or len(value) != 1 or not value.keys() <= CHECKS.keys():
        raise BadRequest("no form")
    [(kind, source)] = value.items()
    form = CHECKS[kind](kind, source)
    if form is None:
        raise BadRequest("no form")
    answer = constrain(vocabulary(), form)
    logits = np.zeros(len(vocabulary()._table), np.float32)
    logits[BYTE_TOKENS:] = 1
    for _ in range(TOKENS):
        if answer.complete:
            return
        values, tokens = answer.allowed(logits)
        token = int(tokens[values.argmax()])
        if token == END:
            return
        try:
            advance(answer, token)
        except InvalidRequest:  # it ends the answer
            return
