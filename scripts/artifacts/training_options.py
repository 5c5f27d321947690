"""Options of `kogpt2 fine-tune`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from command.options import option

CORPUS = Path(__file__).resolve().parents[2] / "model_store" / "corpus"
_count = partial(option, min=1)
_size = partial(option, min=1, rich_help_panel="Size of a new base")


@dataclass(kw_only=True)
class FineTune:
    text: Path | None = option(None, "the text to train on")
    out: Path | None = option(None, "the archive to write, NAME.tar.gz")
    demo: bool = option(False, "build both models of model_store/ again")
    base: Path | None = option(None, "a base model: a folder or tar.gz with *.params and *.spiece")
    base_text: Path = option(CORPUS / "base.txt", "a new base's training text", show_default=False)
    steps: int = _count(600, "training steps")
    seed: int = option(1, "the same seed gives the same model")
    batch_size: int = _count(8, "examples of full length in a batch")
    learning_rate: float | None = option(
        None, "its maximum (0.002 up to 256 units, otherwise 0.00005)"
    )
    max_length: int = option(256, "tokens of the longest example", min=2)
    base_steps: int = _count(200, "training steps of a new base")
    units: int = _size(128, "hidden size")
    layers: int = _size(4, "transformer layers")
    heads: int = _size(4, "attention heads of each layer")
    vocab_size: int = _size(2400, "tokens of the tokenizer")
