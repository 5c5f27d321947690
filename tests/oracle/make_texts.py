"""Has transformers continue texts, as a user of it would: the directory alone says how.

The golden beside this file comes from one command, in the oracle's environment (see make_golden):

    .venv-oracle/bin/python -m tests.oracle.make_texts

For each directory and prompt: the prompt's `ids`, the `new` ids, the `text` that decoding all (but
the token that ended it) has more than decoding the prompt, and the least `margin` between the best
and the second best logit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.oracle.directories import DIRECTORIES, NEW_TOKENS

GOLDEN = Path(__file__).with_name("texts.json")


def continue_texts(folder: Path, prompts: list[str], new_tokens: int) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    answers = {}
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        made = model.generate(
            input_ids=inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=new_tokens,
            do_sample=False,
            pad_token_id=3,
            output_scores=True,
            return_dict_in_generate=True,
        )
        ids = made.sequences[0].tolist()
        count = inputs.input_ids.shape[1]
        best = torch.stack([scores[0].topk(2).values for scores in made.scores])  # (N, 2)
        ended = len(ids) < count + new_tokens
        parts = (ids[:-1] if ended else ids, ids[:count])
        whole, before = (tokenizer.decode(part, skip_special_tokens=True) for part in parts)
        answers[prompt] = {
            "ids": ids[:count],
            "new": ids[count:],
            "text": whole[len(before) :],
            "margin": float((best[:, 0] - best[:, 1]).min()),
        }
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Writes the oracle's texts.",
        epilog="example: .venv-oracle/bin/python -m tests.oracle.make_texts",
    )
    parser.add_argument("--directory", type=Path, help="continue with this one alone")
    parser.add_argument("--prompts", type=Path, help="JSON list of texts")
    parser.add_argument("--new-tokens", type=int, default=NEW_TOKENS)
    parser.add_argument("--out", type=Path, default=GOLDEN, help="the JSON file to write")
    arguments = parser.parse_args()
    answers: dict[str, Any] = {}
    if arguments.directory:
        prompts = json.loads(arguments.prompts.read_text(encoding="utf-8"))
        answers = continue_texts(arguments.directory, prompts, arguments.new_tokens)
    else:
        with tempfile.TemporaryDirectory() as work:
            for directory in DIRECTORIES:
                folder = directory.make(Path(work))
                prompts = list(directory.prompts)
                answers[directory.name] = continue_texts(folder, prompts, directory.new_tokens)
    text = json.dumps(answers, ensure_ascii=False, indent=1) + "\n"
    arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
