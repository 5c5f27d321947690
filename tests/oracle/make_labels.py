"""Labels that transformers gives to texts with classifiers, as JSON.

python -m tests.oracle.make_labels TEXTS_BY_FOLDER ANSWERS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
    pipeline,
)


def text_labels(folder: str, texts: list[Any]) -> dict[str, Any]:
    """Of texts, and pairs: the logits, and what a pipeline answers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    pipe = pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    logits = []
    for text in texts:
        parts = [text] if isinstance(text, str) else [text["text"], text["text_pair"]]
        inputs = tokenizer(*parts, return_tensors="pt", truncation=True)
        with torch.no_grad():
            logits.append(model(**inputs).logits[0].tolist())
    return {
        "logits": logits,
        "alone": pipe(texts[0]),
        "pair": pipe(texts[-1]),
        "list": pipe(texts, truncation=True),
        "all": pipe(texts, truncation=True, top_k=None),
        "two": pipe(texts[0], top_k=2),
        "raw": pipe(texts[:2], function_to_apply="none"),
    }


def token_labels(folder: str, texts: list[Any]) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32)
    pipe = pipeline("token-classification", model=model, tokenizer=tokenizer, device="cpu")
    logits = []
    for text in texts:
        with torch.no_grad():
            logits.append(model(**tokenizer(text, return_tensors="pt")).logits[0].tolist())
    return {
        "logits": logits,
        **{s: [pipe(text, aggregation_strategy=s) for text in texts] for s in ("none", "simple")},
        "every": pipe(texts[0], ignore_labels=[]),
    }


def main() -> None:
    torch.manual_seed(0)
    asked = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    answers = {}
    for folder, texts in asked.items():
        [architecture] = json.loads((Path(folder) / "config.json").read_text())["architectures"]
        work = token_labels if "Token" in architecture else text_labels
        answers[folder] = work(folder, texts)
    text = json.dumps(answers, ensure_ascii=False, default=float)
    Path(sys.argv[2]).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
