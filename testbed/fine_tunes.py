"""Whole fine-tunes and the bases that they were trained from, made by `kogpt2 fine-tune`.

They differ in what decides how far a fine-tune is from its base: learning rate and steps, how long
the base was trained before, and size.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path

from engine.artifacts.config import GPT2Config
from testbed import random_model
from testbed.folders import building
from testbed.process import ROOT, ProgramError

FORMAT = 1  # increase when the trained models change
CORPUS = ROOT / "model_store" / "corpus"
BATCH = ("--batch-size", "4", "--max-length", "128")
# 5.8 million parameters, heads of 64, as the full shape has; 100 KB of text.
PAGES = ("--units", "256", "--layers", "6", "--heads", "4", "--vocab-size", "4000")
PAGES_STEPS, PAGES_LEARNING_RATE = 600, 1e-3


@dataclass(frozen=True)
class Kind:
    """How a fine-tune is trained."""

    text: Path
    steps: int
    learning_rate: float
    batch: tuple[str, ...]  # options of `kogpt2 fine-tune`


SOWOL, DONGJU = CORPUS / "sowol.txt", CORPUS / "dongju.txt"
SMALL = ("--batch-size", "2", "--max-length", "64")
# By base: the demo model of dongju, a model of the Korean pages, random weights.
KINDS = {
    "dongju": (Kind(SOWOL, 300, 5e-5, ()), Kind(SOWOL, 100, 5e-4, ())),
    "pages": tuple(Kind(DONGJU, 100, rate, BATCH) for rate in (2e-5, 5e-5, 1e-4)),
    "random": (Kind(DONGJU, 10, 5e-5, SMALL),),
}


def make_base(
    workdir: Path, name: str, config: GPT2Config = random_model.FULL, steps: int = PAGES_STEPS
) -> Path:
    """Make a base of `KINDS` unless it exists; return its folder. Raises `ProgramError`.

    config: of the one with random weights
    steps: of the one of the pages, 5 minutes of CPU by default
    """
    if name == "random":
        return random_model.make(workdir, config, 0)
    if name != "pages":
        return random_model.demo(name, workdir / "demo")
    pages = [ROOT / "README.ko.md", *sorted((ROOT / "docs").rglob("*.ko.md"))]
    parts = [path.read_text("utf-8") for path in (*pages, CORPUS / "base.txt")]
    text = workdir / "pages.txt"
    workdir.mkdir(parents=True, exist_ok=True)
    text.write_text("\n\n".join(parts), encoding="utf-8")
    content = hashlib.sha256(text.read_bytes()).hexdigest()[:8]
    # One step from random weights, whose tokenizer is of the same text, and the others after it.
    options = ("--base-text", str(text), "--base-steps", "1", *PAGES)
    kind = Kind(text, steps, PAGES_LEARNING_RATE, BATCH)
    return _train(workdir, f"pages-{content}-{steps}", kind, options)


def fine_tune(workdir: Path, base: Path, kind: Kind) -> Path:
    """Train a fine-tune of a base unless it exists; return its folder. Raises `ProgramError`."""
    name = f"{base.name}-{kind.text.stem}-{kind.steps}-{kind.learning_rate}"
    return _train(workdir, name, kind, ("--base", str(base)))


def _train(workdir: Path, name: str, kind: Kind, options: tuple[str, ...]) -> Path:
    """Run `kogpt2 fine-tune` and unpack its archive, unless the folder exists; return that."""
    folder = workdir / f"{name}-v{FORMAT}"
    if folder.is_dir():
        return folder
    with building(folder) as new:
        archive = new / "model.tar.gz"
        given = ["--text", str(kind.text), "--out", str(archive), "--steps", str(kind.steps)]
        given += ["--learning-rate", str(kind.learning_rate), *kind.batch, *options]
        program = [sys.executable, "-m", "scripts.start", "fine-tune", *given]
        done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ProgramError(f"{name} was not trained: {done.stderr.strip()[-500:]}")
        with tarfile.open(archive) as packed:
            packed.extractall(new, filter="data")
        archive.unlink()
    return folder
