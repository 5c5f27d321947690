"""A fine-tune of one's own text."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from command.documents import read_documents
from command.errors import Problem
from command.options import option

STORE = Path(__file__).resolve().parents[2] / "model_store"
CORPUS = STORE / "corpus"
DEMO = ("sowol", "dongju")
_count = partial(option, min=1)
_size = partial(option, min=1, rich_help_panel="Size of a new base")


@dataclass(kw_only=True)
class FineTune:
    text: Path | None = option(None, "the text to learn")
    out: Path | None = option(None, "the archive to write, NAME.tar.gz")
    demo: bool = option(False, "build both models of model_store/ again")
    base: Path | None = option(None, "a folder or tar.gz with *.params and *.spiece to go on from")
    base_text: Path = option(CORPUS / "base.txt", "what a new base learns", show_default=False)
    steps: int = _count(600, "batches of the text")
    seed: int = option(1, "same seed, same model")
    batch_size: int = _count(8, "long examples at a time")
    learning_rate: float | None = option(None, "its peak (0.002 up to 256 units, else 0.00005)")
    max_length: int = option(256, "longest text in tokens", min=2)
    base_steps: int = _count(200, "batches of a new base's text")
    units: int = _size(128, "of each position")
    layers: int = _size(4, "of attention")
    heads: int = _size(4, "of each layer")
    vocab_size: int = _size(2000, "pieces of the tokenizer")


def run(options: FineTune) -> None:
    """Trains a KoGPT2 fine-tune on a text and packs it for model_store/, with MXNet on the CPU.

    Without --base it first trains a tokenizer and a small base model; with --base it goes on from
    that model, for example your copy of KoGPT2 v1. The text is UTF-8; blank lines separate
    documents, and a line that begins with "# " is a title and is not learned. Given a line, the
    model goes on with the lines that follow it, and stops where the document ends.

    Examples:
    kogpt2 fine-tune --text poems.txt --out model_store/poems.tar.gz
    kogpt2 fine-tune --text poems.txt --out poems.tar.gz --base kogpt2_v1/ --steps 200
    kogpt2 fine-tune --demo        builds model_store/sowol.tar.gz and dongju.tar.gz again
    """
    began = time.monotonic()
    jobs = check(options)
    from scripts.artifacts.training import fine_tune, train_base

    with tempfile.TemporaryDirectory() as work:
        base = options.base
        if base is None:
            base = Path(work, "base.tar.gz")
            train_base([text for text, _ in jobs], base, options)
        for text, out in jobs:
            fine_tune(base, text, out, options)
    print(f"{time.monotonic() - began:.0f} s in all")


def check(options: FineTune) -> list[tuple[Path, Path]]:
    """The (text, out) pairs to train; finds what can be found before anything slow begins."""
    if options.demo and not (options.text or options.out):
        jobs = [(CORPUS / f"{name}.txt", STORE / f"{name}.tar.gz") for name in DEMO]
    elif options.text and options.out and not options.demo:
        jobs = [(options.text, options.out)]
    else:
        raise Problem("give --text and --out, or --demo")
    if options.units % options.heads:
        raise Problem(f"--heads {options.heads} does not divide --units {options.units}")
    for text, out in jobs:
        read_documents(text)
        if not out.name.endswith(".tar.gz") or out.is_dir():
            raise Problem(f"{out} must be a file NAME.tar.gz")
        if out.exists() and not options.demo:
            raise Problem(f"{out} is there already; remove it or choose another name")
        try:
            tempfile.TemporaryFile(dir=out.parent).close()
        except OSError as error:
            raise Problem(f"cannot write into {out.parent}: {error.strerror}") from None
    return jobs
