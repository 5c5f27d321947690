"""One kind of model into another, proved by its logits."""

from __future__ import annotations

import shutil
import tempfile
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
    to: Literal["hf", "v1", "prepared", "onnx"] = option(..., "what to make")
    precision: Literal["int8", "fp32"] = option("int8", "of prepared")
    past: bool = option(False, "of onnx: with keys and values of earlier tokens")
    spiece: Path | None = option(None, "of v1: the sentencepiece model, where the source has none")
    text: Path | None = option(
        None, "lines that both tokenizers must cut alike, beside the own ones"
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

    Examples:
    kogpt2 convert kogpt2-v1/ kogpt2-hf/ --to hf
    kogpt2 convert my-fine-tune-hf/ my-fine-tune-v1/ --to v1 --spiece kogpt2.spiece
    kogpt2 convert my-model/ my-model-ready/ --to prepared --precision int8
    kogpt2 convert my-model/ models/my-model/ --to onnx --past
    """
    if options.target.exists():
        raise Problem(f"{options.target} is there already; remove it or choose another name")
    from scripts.lib import converting
    from scripts.lib.folders import model_folder

    backend = "native"
    precision = options.precision if options.to == "prepared" else "fp32"
    with model_folder(options.source) as given:
        said = _convert(options, converting.open_source(given), backend, precision)
    for line in [f"{options.source} -> {options.target}", *said]:
        print(line)


def _convert(options: Convert, source: Artifact, backend: str, precision: str) -> list[str]:
    """Returns what there is to say of it."""
    from tqdm import tqdm

    from scripts.lib import converting

    texts = options.text.read_text(encoding="utf-8").splitlines() if options.text else []
    options.target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{options.target.name}.", dir=options.target.parent))
    said: list[str] = []
    try:
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
        converting.let_others_read(folder)
        folder.rename(options.target)
        if options.to == "prepared":
            converting.prepare(options.target, backend, precision)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return said
