"""`kogpt2 convert`: converts a model from one kind into another."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from command.blas import single_threaded_blas
from command.documents import read_text
from command.errors import Problem
from command.options import argument, option

if TYPE_CHECKING:
    from engine.artifacts.artifact import Artifact


@dataclass(kw_only=True)
class Convert:
    source: Path = argument("the model's folder or archive, v1 or Hugging Face")
    target: Path = argument("the folder to make; it must not exist")
    to: Literal["hf", "v1", "prepared", "delta", "whole"] = option(..., "the kind to make")
    precision: Literal["int8", "fp32"] = option("int8", "for prepared")
    spiece: Path | None = option(
        None, "for v1: the sentencepiece model, if the source has a tokenizer.json only"
    )
    base: Path | None = option(None, "for delta and whole: the base model")
    text: Path | None = option(
        None,
        "lines for which both tokenizers must give the same ids, beside built-in ones; for delta"
        " and prepared: lines on which both models are compared",
    )
    compare: bool = option(
        True, "for delta and prepared: compare with fp32", "--compare/--no-compare"
    )


def run(options: Convert) -> None:
    """Convert a model from one kind into another, and compare the logits before and after.

    hf: a directory of Hugging Face's transformers (config.json, model.safetensors,
    tokenizer.json); also from a pytorch_model.bin, whose pickle is not executed.

    v1: *.params and *.spiece, as KoGPT2 v1 has them.

    prepared: the same model and its prepared file, so that its first load is as fast as any later
    one, on all processors and with both backends of a CPU. Shows what int8 changes: in the lines of
    --text, or in the model's own greedy texts.

    delta: what a whole fine-tune adds to its --base, a fraction of its size and about as exact as
    int8. It is served beside that very base, whose memory and steps all its deltas share. Shows
    what it changes, in the lines of --text or in the model's own greedy texts.

    whole: an adapter merged into its --base, or the model that a delta is beside its, as hf. What
    the delta left of the fine-tune is approximate.

    Examples:
    kogpt2 convert kogpt2-v1/ kogpt2-hf/ --to hf
    kogpt2 convert my-fine-tune-hf/ my-fine-tune-v1/ --to v1 --spiece kogpt2.spiece
    kogpt2 convert my-model/ my-model-ready/ --to prepared --precision int8
    kogpt2 convert my-fine-tune/ my-delta/ --to delta --base kogpt2/ --text lines.txt
    kogpt2 convert my-adapter/ my-fine-tune/ --to whole --base kogpt2/
    """
    if options.target.exists():
        raise Problem(f"{options.target} exists: remove it or choose another name")
    if (options.base is None) is (options.to in ("delta", "whole")):
        raise Problem("--to delta and --to whole need --base, and no other kind takes it")
    if options.spiece is not None and options.to != "v1":
        raise Problem("--spiece is for --to v1")
    if options.precision != "int8" and options.to != "prepared":
        raise Problem("--precision is for --to prepared")
    single_threaded_blas()
    from scripts.artifacts import conversion
    from scripts.artifacts.folder import model_folder

    with model_folder(options.source) as source:
        if options.base is None:
            lines = _convert(options, conversion.open_source(source, options.to == "prepared"))
        else:
            with model_folder(options.base) as base:
                lines = _convert_with_base(options, source, conversion.open_source(base))
    for line in [f"{options.source} -> {options.target}", *lines]:
        print(line)


def _convert(options: Convert, source: Artifact) -> list[str]:
    """Convert to hf, v1 or prepared; return lines for the user."""
    from engine.prepared.folder import NAME as PREPARED
    from scripts.artifacts import comparison, conversion

    texts, lines = _texts(options), list[str]()
    precision = options.precision if options.to == "prepared" else "fp32"
    with _complete(options.target) as folder, _progress(source) as advance:
        if options.to == "hf":
            lines = conversion.to_hugging_face(source, folder, texts, advance)
        elif options.to == "v1":
            lines = conversion.to_v1(source, folder, options.spiece, texts, advance)
        else:
            conversion.to_prepared(source, folder, precision)
        if precision == "fp32":
            lines.append(conversion.verify(source, folder, options.to))
        elif options.compare and source.classifier is None:
            cache = folder / PREPARED
            converted = conversion.open_source(folder)
            lines.append(comparison.report(options.target, converted, texts, cache))
    if options.to == "prepared":
        conversion.prepare(options.target, precision)
    return lines


def _convert_with_base(options: Convert, source: Path, base: Artifact) -> list[str]:
    """Convert a whole model to a delta of `base`, or a delta or an adapter to a whole model.

    Returns lines for the user.
    """
    from scripts.artifacts import comparison, conversion

    with _complete(options.target) as folder:
        if options.to == "whole":
            return conversion.to_whole(source, base, folder)
        whole, texts = conversion.open_source(source, classifies=True), _texts(options)
        with tempfile.TemporaryDirectory(prefix="convert-") as work:
            cache = Path(work)
            lines = [conversion.to_delta(whole, base, folder, cache)]
            if options.compare and whole.classifier is None:
                target = options.target
                lines += comparison.report_delta(target, folder, whole, base, texts, cache)
            return lines


def _texts(options: Convert) -> list[str]:
    return read_text(options.text).splitlines() if options.text else []


@contextmanager
def _progress(source: Artifact) -> Iterator[Callable[[int], object]]:
    """A progress bar over the bytes of the source's weights."""
    from tqdm import tqdm

    total = sum(weight.nbytes for weight in source.weights.values())
    with tqdm(total=total, unit="B", unit_scale=True, disable=None, leave=False) as bar:
        yield bar.update


@contextmanager
def _complete(target: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `target` unless an error is raised."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        # Other users, as the server's, must read the files; safetensors creates private ones.
        for path in (folder, *folder.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
