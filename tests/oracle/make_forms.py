"""Writes greedy texts that transformers makes where a logits processor allows only what a regular
expression may go on with: `python -m tests.oracle.make_forms MODEL_DIR < asked.json`.

Whether a text may go on is asked of the `regex` module's partial matches, token after token.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import regex
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LogitsProcessor


class Held(LogitsProcessor):
    """Allows the tokens after which the answer's bytes may still become a match."""

    def __init__(self, pattern: str, alphabet: str, pieces: list[bytes], begin: int, eos: int):
        self._pattern = regex.compile(pattern)
        self._letters = [(letter, letter.encode()) for letter in alphabet]
        self._pieces, self._begin, self._eos = pieces, begin, eos

    def may_match(self, written: bytes) -> bool:
        for length in range(min(4, len(written) + 1)):
            head, tail = written[: len(written) - length], written[len(written) - length :]
            try:
                text = head.decode()
            except UnicodeDecodeError:
                continue
            if not tail:
                return self._pattern.fullmatch(text, partial=True) is not None
            return any(
                code.startswith(tail) and self._pattern.fullmatch(text + letter, partial=True)
                for letter, code in self._letters
            )
        return False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        written = b"".join(self._pieces[i] for i in input_ids[0, self._begin :].tolist())
        allowed = torch.full_like(scores, -torch.inf)
        for token, piece in enumerate(self._pieces):
            if piece and self.may_match(written + piece):
                allowed[0, token] = 0
        if is_match(self._pattern, written):
            allowed[0, self._eos] = 0
        return scores + allowed


def is_match(pattern: Any, written: bytes) -> bool:
    try:
        return pattern.fullmatch(written.decode()) is not None
    except UnicodeDecodeError:
        return False


def main(folder: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = json.load(sys.stdin)
    found = []
    for one in asked["answers"]:
        pieces = [bytes.fromhex(piece) for piece in asked["pieces"]]
        ids = torch.tensor([tokenizer(one["prompt"])["input_ids"]])
        held = Held(one["pattern"], one["alphabet"], pieces, ids.shape[1], asked["eos"])
        new: list[int] = []
        while len(new) < one["max_new_tokens"]:
            with torch.no_grad():
                logits = model(ids).logits[:, -1]
            token = int(held(ids, logits).argmax())
            new.append(token)
            if token == asked["eos"]:
                break
            ids = torch.cat([ids, torch.tensor([[token]])], dim=1)
            written = b"".join(pieces[i] for i in new)
            if is_match(held._pattern, written) and not any(
                piece and held.may_match(written + piece) for piece in pieces
            ):
                break  # nothing can follow
        found.append(new)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
