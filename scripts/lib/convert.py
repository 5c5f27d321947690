"""One kind of model into another, proved by its logits."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from scripts.lib.problem import Problem
from scripts.options import argument, option

if TYPE_CHECKING:
    from engine.artifacts.artifact import Artifact


@dataclass(kw_only=True)
class Convert:
    source: Path = argument("the model's folder or archive, v1 or Hugging Face")
    target: Path = argument("the folder to make; it must not be there")
    to: Literal["hf", "v1", "prepared", "onnx", "adapter", "whole"] = option(..., "what to make")
    precision: Literal["int8", "fp32"] = option("int8", "of prepared")
    past: bool = option(False, "of onnx: with keys and values of earlier tokens")
    spiece: Path | None = option(None, "of v1: the sentencepiece model, where the source has none")
    base: Path | None = option(None, "of adapter and whole: the model that the adapter is for")
    rank: int = option(16, "of adapter")
    text: Path | None = option(
        None,
        "lines that both tokenizers must cut alike, beside the own ones; of adapter: to compare on",
    )


def run(options: Convert) -> None:
    """Turns one kind of model into another, and compares the logits before and after.

    hf: a directory of Hugging Face's transformers (config.json, model.safetensors,
    tokenizer.json); also from a pytorch_model.bin, whose pickle is not executed.

    v1: *.params and *.spiece, as KoGPT2 v1 has them.

    prepared: the same model with its prepared file beside it, so that its first load is as fast as
    any later one, on all processors and with both backends of a CPU.

    onnx: NAME/1/model.onnx of standard operators, for Triton and others: input_ids and
    attention_mask in, logits out; --past adds keys and values.

    adapter: what distinguishes a whole fine-tune from its --base, as a LoRA adapter of --rank, and
    a table of what each rank would cost. Adapters of one base share its memory and its steps.

    whole: an adapter merged into its --base, as hf.

    Examples:
    kogpt2 convert kogpt2-v1/ kogpt2-hf/ --to hf
    kogpt2 convert my-fine-tune-hf/ my-fine-tune-v1/ --to v1 --spiece kogpt2.spiece
    kogpt2 convert my-model/ my-model-ready/ --to prepared --precision int8
    kogpt2 convert my-model/ models/my-model/ --to onnx --past
    kogpt2 convert my-fine-tune/ my-adapter/ --to adapter --base kogpt2/ --rank 16 --text lines.txt
    kogpt2 convert my-adapter/ my-fine-tune/ --to whole --base kogpt2/
    """
    if options.target.exists():
        raise Problem(f"{options.target} is there already; remove it or choose another name")
    from scripts.lib import converting
    from scripts.lib.folders import model_folder

    if (options.base is None) is (options.to in ("adapter", "whole")):
        raise Problem("--base is for --to adapter and --to whole, which need it")
    backend = "native"
    precision = options.precision if options.to == "prepared" else "fp32"
    with model_folder(options.source) as given:
        if options.base is None:
            said = _convert(options, converting.open_source(given), backend, precision)
        else:
            with model_folder(options.base) as base:
                said = _convert_adapter(options, given, converting.open_source(base))
    for line in [f"{options.source} -> {options.target}", *said]:
        print(line)


def _convert_adapter(options: Convert, source: Path, base: Artifact) -> list[str]:
    """Between a whole model and an adapter of `base`; returns what there is to say of it."""
    from tqdm import tqdm

    from scripts.lib import converting, lora

    with _made(options.target) as folder:
        if options.to == "whole":
            return converting.to_whole(source, base, folder)
        whole = converting.open_source(source)
        total = converting.num_bytes(whole)
        with tqdm(total=total, unit="B", unit_scale=True, disable=None, leave=False) as bar:
            texts = _lines(options)
            return lora.to_adapter(whole, base, folder, options.rank, texts, bar.update)


def _lines(options: Convert) -> list[str]:
    return options.text.read_text(encoding="utf-8").splitlines() if options.text else []


@contextmanager
def _made(target: Path) -> Iterator[Path]:
    """A folder that becomes `target` once all is in it."""
    from scripts.lib import converting

    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield folder
        converting.let_others_read(folder)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _convert(options: Convert, source: Artifact, backend: str, precision: str) -> list[str]:
    """Returns what there is to say of it."""
    from tqdm import tqdm

    from scripts.lib import converting

    texts, said = _lines(options), list[str]()
    with _made(options.target) as folder:
        total = converting.num_bytes(source)
        with tqdm(
            total=total,
            desc=f"to {options.to}",
            unit="B",
            unit_scale=True,
            disable=None,
            leave=False,
        ) as bar:
            if options.to == "hf":
                said = converting.to_hugging_face(source, folder, texts, bar.update)
            elif options.to == "v1":
                said = converting.to_v1(source, folder, options.spiece, texts, bar.update)
            elif options.to == "prepared":
                converting.to_prepared(source, folder, backend, precision)
            else:
                converting.to_onnx(source, folder, options.past, bar.update)
            bar.set_description("comparing logits")
            said.append(
                converting.verify(source, folder, options.to, backend, precision, options.past)
            )
    if options.to == "prepared":
        converting.prepare(options.target, backend, precision)
    return said
