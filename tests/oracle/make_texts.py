"""Has transformers continue texts, as its users do: only the directory decides how.

Without arguments the golden beside this file, in the oracle's environment (see make_golden):

    .venv-oracle/bin/python -m tests.oracle.make_texts [PROMPTS.json OUT.json]

PROMPTS.json has the prompts by directory. For each of both: the prompt's `ids`, the `new` ids, the
`text` that decoding all (but the token that ended it) has more than decoding the prompt, and the
least `margin` between the best and the second best logit.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.oracle.directories import DIRECTORIES, NEW_TOKENS, PROMPTS, make
from tests.oracle.generate import greedy

GOLDEN = Path(__file__).with_name("texts.json")


def continue_texts(folder: Path, prompts: Sequence[str]) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    answers = {}
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt").input_ids
        ids, (new, margins) = inputs[0].tolist(), greedy(model, inputs, NEW_TOKENS)
        parts = (ids + (new[:-1] if len(new) < NEW_TOKENS else new), ids)
        whole, before = (tokenizer.decode(part, skip_special_tokens=True) for part in parts)
        text = whole[len(before) :]
        answers[prompt] = {"ids": ids, "new": new, "text": text, "margin": min(margins)}
    return answers


def main() -> None:
    answers: dict[str, Any] = {}
    given, out = [Path(argument) for argument in sys.argv[1:]], GOLDEN
    if given:
        prompts, out = given
        for folder, each in json.loads(prompts.read_text(encoding="utf-8")).items():
            answers[folder] = continue_texts(Path(folder), each)
    else:
        with tempfile.TemporaryDirectory() as work:
            for name in DIRECTORIES:
                answers[name] = continue_texts(make(name, Path(work)), PROMPTS)
    lines = (f"{json.dumps(n)}: {json.dumps(a, ensure_ascii=False)}" for n, a in answers.items())
    out.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
