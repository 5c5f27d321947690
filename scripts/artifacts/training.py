"""Trains a tokenizer, a base model and fine-tunes of it, and packs them.

Shapes: B examples, T tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import re
import string
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import sentencepiece
from tqdm import tqdm

from command.documents import Documents, read_documents, write_json
from command.errors import Problem
from common.errors import ArtifactError
from common.model_files import BASE_NAME
from common.mxnet_compat import mx
from engine.artifacts.artifact import shapes
from engine.artifacts.config import GPT2Config
from engine.artifacts.open import open_artifact
from engine.backends.mxnet.gpt2 import GPT2
from scripts.artifacts.archive import SUFFIX, write_tar
from scripts.artifacts.folder import model_folder
from scripts.artifacts.training_options import FineTune

# GluonNLP imports MXNet itself, so it comes after common.mxnet_compat.
import gluonnlp  # isort: skip


def train_tokenizer(documents: Documents, vocab_size: int) -> bytes:
    """Train a sentencepiece BPE model that can write every text.

    It has the documents' characters, printable ASCII (what JSON is made of), and a piece for each
    byte of any other character.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=itertools.chain.from_iterable(documents),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=1.0,
            required_chars=string.ascii_letters + string.digits + string.punctuation,
            byte_fallback=True,
            max_sentence_length=1 << 20,
            unk_id=0,
            pad_id=1,
            bos_id=2,
            eos_id=3,
            minloglevel=2,
        )
    except RuntimeError as error:
        limit = re.search(r"<= (\d+)|required_chars\. \d+ vs (\d+)", str(error))
        if limit is None:
            raise
        maximum, minimum = limit.groups()
        raise Problem(
            f"the text is too short for a vocabulary of {vocab_size} pieces:"
            f" give more text, or --vocab-size {maximum} or less"
            if maximum
            else f"the text has more characters than a vocabulary of {vocab_size} pieces can hold:"
            f" give --vocab-size {minimum} or more"
        ) from None
    return model.getvalue()


class Tokenizer:
    """A sentencepiece model with the pieces `<pad> <s> </s>`.

    GluonNLP's wrapper samples, and fails with sentencepiece 0.2.
    """

    def __init__(self, spiece: Path, vocab_size: int) -> None:
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(spiece))
        if len(self._model) > vocab_size:
            raise Problem(f"{spiece.name} has {len(self._model)} pieces, the model {vocab_size}")
        self.unk: int = self._model.unk_id()
        self.pad, self.bos, self.eos = map(self._id, ("<pad>", "<s>", "</s>"))

    def _id(self, piece: str) -> int:
        token: int = self._model.piece_to_id(piece)
        if self._model.id_to_piece(token) != piece:
            raise Problem(f"the tokenizer of the base has no piece {piece}")
        return token

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._model.encode(text)
        return ids


def make_examples(documents: Documents, tokenizer: Tokenizer, window: int) -> list[list[int]]:
    """Make an example of each line: `<s>` and `window` tokens from there on at most.

    `</s>` stands at the end of a document. A repeated line of a document starts an example only
    once. The first example of a document is repeated, a fourth as often as there are examples,
    because its beginning is in one example and its end in many.
    """
    examples = []
    for lines in documents:
        encoded = [tokenizer.ids(line) for line in lines]
        ids = [*itertools.chain.from_iterable(encoded), tokenizer.eos]
        offsets = itertools.accumulate((len(line) for line in encoded[:-1]), initial=0)
        first: dict[str, int] = {}
        for line, offset in zip(lines, offsets, strict=True):
            first.setdefault(line, offset)
        starts = sorted({*first.values(), *range(0, len(ids) - 1, window)})
        for start in [0] * (len(starts) // 4) + starts:
            examples.append([tokenizer.bos, *ids[start : start + window]])
    return examples


def batches(examples: list[list[int]], batch_size: int, pad: int) -> Iterator[Any]:
    """Yield shuffled batches (B, T) of examples of about the same length, without end.

    Batches of short examples have more of them, so that each has about as many tokens.
    """
    stack = gluonnlp.data.batchify.Pad(pad_val=pad, dtype="int32")
    sampler = gluonnlp.data.FixedBucketSampler(
        [len(e) for e in examples],
        min(batch_size, len(examples)),
        num_buckets=4,
        ratio=0.5,
        shuffle=True,
    )
    while True:
        for chosen in sampler:
            yield stack([examples[i] for i in chosen])


def train(
    config: GPT2Config,
    weights: dict[str, Any],
    documents: Documents,
    tokenizer: Tokenizer,
    steps: int,
    options: FineTune,
    label: str,
) -> str:
    """Train the weights in place; return a line with the loss per token and the time."""
    window = min(options.max_length, config.max_length) - 1
    examples = make_examples(documents, tokenizer, window)
    unknown = sum(e.count(tokenizer.unk) for e in examples) / sum(map(len, examples))
    if unknown > 0.01:
        print(f"{label}: {unknown:.0%} of the text is unknown to the tokenizer", file=sys.stderr)
    np.random.seed(options.seed)
    peak = options.learning_rate or (2e-3 if config.units <= 256 else 5e-5)
    for weight in weights.values():
        weight.attach_grad()
    model = GPT2(config, weights)
    adam = mx.optimizer.Adam(learning_rate=peak, beta2=0.99)
    update = mx.optimizer.get_updater(adam)
    warm_up = max(steps // 10, 1)
    data = batches(examples, options.batch_size, tokenizer.pad)
    began, losses = time.monotonic(), []
    with tqdm(range(steps), desc=label, unit="step", mininterval=0.5) as bar:
        for step in bar:
            ids = next(data)
            labels = ids[:, 1:]
            mask = (labels != tokenizer.pad).astype("float32")  # (B, T - 1)
            with mx.autograd.record():
                scores = mx.nd.log_softmax(model(ids[:, :-1]))  # (B, T - 1, V)
                loss = -(mx.nd.pick(scores, labels) * mask).sum() / mask.sum()
            loss.backward()
            gradients = [weight.grad for weight in weights.values()]
            mx.gluon.utils.clip_global_norm(gradients, 1.0, check_isfinite=False)
            done = (step - warm_up) / max(steps - warm_up, 1)
            decay = 0.5 + 0.5 * math.cos(math.pi * max(done, 0))  # cosine, to zero
            adam.set_learning_rate(peak * min((step + 1) / warm_up, decay))
            for i, weight in enumerate(weights.values()):
                update(i, weight.grad, weight)
            losses.append(float(loss.asscalar()))
            bar.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
    last = sum(losses[-10:]) / len(losses[-10:])
    return f"loss {losses[0]:.3f} -> {last:.3f} in {time.monotonic() - began:.0f} s"


def random_weights(config: GPT2Config, seed: int) -> dict[str, Any]:
    mx.random.seed(seed)
    weights = {}
    for name, shape in sorted(shapes(config), key=lambda each: each[0].startswith("_ffn_layers")):
        if name.endswith(".weight"):
            weights[name] = mx.nd.random.normal(scale=0.02, shape=shape)
        else:
            weights[name] = (mx.nd.ones if name.endswith(".gamma") else mx.nd.zeros)(shape)
    return weights


def pack(
    config: GPT2Config, weights: dict[str, Any], spiece: bytes, out: Path, base: Path | None = None
) -> None:
    """Write the archive, with the name of its base; the same files give the same bytes."""
    name = out.name.removesuffix(SUFFIX)
    # Flags are left out: KoGPT2 v1 has the default of each.
    sizes = {n: v for n, v in dataclasses.asdict(config).items() if not isinstance(v, bool)}
    if base is not None:  # by this the server finds it in the store
        sizes[BASE_NAME] = base.resolve().name.removesuffix(SUFFIX)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{name}-") as work:
        folder, archive = Path(work, name), Path(work, "archive")
        folder.mkdir()
        write_json(folder / "config.json", sizes, 2)
        (folder / f"{name}.spiece").write_bytes(spiece)
        mx.nd.save(str(folder / f"{name}.params"), weights)
        with archive.open("wb") as file:
            write_tar(folder, sorted(folder.iterdir()), file)
        archive.chmod(0o644)
        archive.replace(out)


def train_base(texts: list[Path], out: Path, options: FineTune) -> None:
    """Train a tokenizer on all texts and a base model on `--base-text`."""
    documents = read_documents(options.base_text)
    all_documents = [*documents, *itertools.chain.from_iterable(map(read_documents, texts))]
    spiece = train_tokenizer(all_documents, options.vocab_size)
    spiece_file = out.with_name("base.spiece")
    spiece_file.write_bytes(spiece)
    config = GPT2Config(
        vocab_size=options.vocab_size,
        units=options.units,
        num_layers=options.layers,
        num_heads=options.heads,
        hidden_size=4 * options.units,
        max_length=options.max_length,
    )
    weights = random_weights(config, options.seed)
    result = train(
        config,
        weights,
        documents,
        Tokenizer(spiece_file, config.vocab_size),
        options.base_steps,
        options,
        "base",
    )
    pack(config, weights, spiece, out)
    print(f"base: {result}")


def fine_tune(base: Path, text: Path, out: Path, options: FineTune) -> None:
    with model_folder(base) as folder:
        try:
            artifact = open_artifact(folder)
        except (OSError, ArtifactError) as error:
            raise Problem(f"{base} cannot be read as a model: {error}") from None
        if artifact.tokenizer_file.suffix != ".spiece":
            raise Problem(
                f"{base} is a Hugging Face model: use transformers' Trainer, and serve what its"
                " save_model writes (docs/models/artifacts.md)"
            )
        config = artifact.config
        weights = {n: mx.nd.array(w, dtype="float32") for n, w in artifact.weights.items()}
        tokenizer = Tokenizer(artifact.tokenizer_file, artifact.config.vocab_size)
        name = out.name.split(".")[0]
        documents = read_documents(text)
        result = train(config, weights, documents, tokenizer, options.steps, options, name)
        spiece = artifact.tokenizer_file.read_bytes()
        pack(config, weights, spiece, out, options.base)
    print(f"{out}: {out.stat().st_size / 1e6:.2f} MB, {result}")
