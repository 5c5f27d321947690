"""`kogpt2 fine-tune`: trains a fine-tune on a text."""

from __future__ import annotations

import tempfile
import time
from dataclasses import fields
from pathlib import Path

from command.documents import check_writable, read_documents
from command.errors import Problem
from scripts.artifacts.training_options import CORPUS, FineTune

DEMO = ("sowol", "dongju")
NEW_BASE = ("base_text", "base_steps", "units", "layers", "heads", "vocab_size")  # options


def run(options: FineTune) -> None:
    """Train a KoGPT2 fine-tune on a text and pack it for model_store/, with MXNet on the CPU.

    Without --base it first trains a tokenizer and a small base model; with --base it starts from
    that model, for example your copy of KoGPT2 v1. The text is UTF-8. Blank lines separate
    documents; lines that begin with "# " are titles and are not trained on. The model learns to
    continue a line with those that follow it, and to stop at the end of the document.

    Examples:
    kogpt2 fine-tune --text poems.txt --out model_store/poems.tar.gz
    kogpt2 fine-tune --text poems.txt --out poems.tar.gz --base kogpt2_v1/ --steps 200
    kogpt2 fine-tune --demo        builds model_store/sowol.tar.gz and dongju.tar.gz again
    """
    start = time.monotonic()
    jobs = check(options)
    from scripts.artifacts.training import fine_tune, train_base

    with tempfile.TemporaryDirectory() as work:
        base = options.base
        if base is None:
            base = Path(work, "base.tar.gz")
            train_base([text for text, _ in jobs], base, options)
        for text, out in jobs:
            fine_tune(base, text, out, options)
    print(f"{time.monotonic() - start:.0f} s in all")


def check(options: FineTune) -> list[tuple[Path, Path]]:
    """Check the options before training starts; return the (text, archive) pairs to train."""
    if options.demo and not (options.text or options.out):
        store = CORPUS.parent
        jobs = [(CORPUS / f"{name}.txt", store / f"{name}.tar.gz") for name in DEMO]
    elif options.text and options.out and not options.demo:
        jobs = [(options.text, options.out)]
    else:
        raise Problem("give --text and --out, or --demo")
    for field in fields(FineTune):
        if options.base and field.name in NEW_BASE and vars(options)[field.name] != field.default:
            raise Problem(f"--{field.name.replace('_', '-')} is for a new base: leave out --base")
    if options.units % options.heads:
        raise Problem(f"--heads {options.heads} does not divide --units {options.units}")
    for text, out in jobs:
        read_documents(text)
        if not out.name.endswith(".tar.gz") or out.is_dir():
            raise Problem(f"{out} must be a file NAME.tar.gz")
        if out.exists() and not options.demo:
            raise Problem(f"{out} exists: remove it or choose another name")
        check_writable(out)
    return jobs
