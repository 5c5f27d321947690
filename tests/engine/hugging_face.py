"""Small directories as transformers' `save_pretrained` writes them, with random weights and
tokenizers trained here. Needs numpy and tokenizers alone: the oracle's environment imports it."""

from __future__ import annotations

import itertools
import json
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from command.model_writer import write_safetensors
from engine.artifacts.config import GPT2Config
from engine.artifacts.hugging_face import names
from testbed.weights import random_weights
from tests.engine.sentences import SENTENCES

KINDS = ("metaspace", "byte-level", "char-bpe", "byte-fallback")
SPECIAL = ["<s>", "</s>", "<usr>", "<pad>", "<sys>", "<unk>", "<mask>"]
UNUSED = [f"<unused{i}>" for i in range(4)]
EOS = SPECIAL.index("</s>")
MORE = ("🙂 안녕 😤", "가족 👩‍👩‍👧 사진", "漢字 café naïve", "ㅋㅋㅋ ^^ :)")
TOKENIZER_SIZE = 420

# The model whose weights `pytorch_model.bin` beside this file has, written by torch itself.
TINY = {"layers": 1, "units": 16, "heads": 2, "vocab": 440, "max_length": 64, "seed": 9}


def train_tokenizer(kind: str, size: int = TOKENIZER_SIZE) -> Tokenizer:
    """Of KoGPT2 v2's kind (`metaspace`), GPT-2's (`byte-level`), and two others.

    Its special tokens are v2's, `<unused0>`... are added tokens that are not special.
    """
    special, alphabet = [*SPECIAL], list[str]()
    if kind == "char-bpe":
        tokenizer = Tokenizer(suffixed_bpe((*SENTENCES, *MORE)))
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
        tokenizer.add_special_tokens(SPECIAL)
        tokenizer.add_tokens(UNUSED)
        return tokenizer
    if kind == "byte-level":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    elif kind == "byte-fallback":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))  # noqa: S106
        tokenizer.normalizer = normalizers.Replace(Regex(" "), "▁")
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps)
        special += [f"<0x{i:02X}>" for i in range(256)]
        size += 256
    else:
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))  # noqa: S106
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    texts = SENTENCES if kind == "byte-fallback" else (*SENTENCES, *MORE)
    tokenizer.train_from_iterator(texts * 4, trainer)
    if kind == "byte-fallback":  # pieces as any other
        fields = json.loads(tokenizer.to_str())
        fields["added_tokens"] = fields["added_tokens"][: len(SPECIAL)]
        tokenizer = Tokenizer.from_str(json.dumps(fields))
    tokenizer.add_tokens(UNUSED)
    return tokenizer


def suffixed_bpe(texts: Sequence[str], merges: int = 100) -> models.BPE:
    """Learns merges of characters, the last of a word marked. The library's own trainer gives such
    characters their ids in another order each time."""
    words = [
        [*word[:-1], word[-1] + "</w>"]
        for text in texts
        for word in re.findall(r"\w+|[^\w\s]+", unicodedata.normalize("NFKC", text))
    ]
    vocabulary = dict.fromkeys([*SPECIAL, *sorted({piece for word in words for piece in word})])
    learned: list[tuple[str, str]] = []
    while len(learned) < merges:
        pairs = Counter(pair for word in words for pair in itertools.pairwise(word))
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        learned.append(best)
        vocabulary["".join(best)] = None
        for word in words:
            for i in range(len(word) - 1):
                if tuple(word[i : i + 2]) == best:
                    word[i : i + 2] = ["".join(best)]
    ids = {piece: i for i, piece in enumerate(vocabulary)}
    return models.BPE(ids, learned, unk_token="<unk>", end_of_word_suffix="</w>")  # noqa: S106


def make_hugging_face(
    path: Path,
    *,
    kind: str = "metaspace",
    layers: int = 2,
    units: int = 64,
    heads: int = 4,
    hidden: int | None = None,
    vocab: int = 700,
    max_length: int = 128,
    activation: str = "gelu_new",
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    config: dict[str, Any] | None = None,
    generation_config: dict[str, Any] | None = None,
    tokenizer_config: dict[str, Any] | None = None,
    begins: bool = False,
    labels: Sequence[str] = (),
    of_tokens: bool = False,
) -> Path:
    """Writes a directory and returns it. `config` holds further fields of `config.json`; with
    `begins` the tokenizer puts `<s>` in front, with `labels` the model is a classifier."""
    extra = config or {}
    if labels:
        task = "Token" if of_tokens else "Sequence"
        extra = {
            "architectures": [f"GPT2For{task}Classification"],
            "id2label": {str(i): label for i, label in enumerate(labels)},
            "pad_token_id": SPECIAL.index("<pad>"),
            **extra,
        }
    names_ = ("tie_word_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx")
    flags = {name: extra[name] for name in names_ if name in extra}
    flags["layer_norm_eps"] = extra.get("layer_norm_epsilon", 1e-5)
    shape = GPT2Config(vocab, units, layers, heads, hidden or 4 * units, max_length, **flags)
    path.mkdir(parents=True, exist_ok=True)
    fields = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": vocab,
        "n_embd": units,
        "n_layer": layers,
        "n_head": heads,
        "n_inner": hidden,
        "n_positions": max_length,
        "activation_function": activation,
        "eos_token_id": EOS,
        "bos_token_id": 0,
        **extra,
    }
    write_json(path / "config.json", fields)
    if generation_config is not None:
        write_json(path / "generation_config.json", generation_config)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    theirs = {"tokenizer_class": "PreTrainedTokenizerFast", **tokens, **(tokenizer_config or {})}
    write_json(path / "tokenizer_config.json", theirs)
    tokenizer = train_tokenizer(kind)
    if begins:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    weights = list(their_weights(shape, seed, dtype))
    if labels:
        weights = [(name, w) for name, w in weights if not name.startswith("lm_head")]
        weights += their_head(len(labels), units, seed, dtype, of_tokens=of_tokens)
    write_weights(path, weights, shards)
    return path


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


def write_weights(path: Path, weights: list[tuple[str, NDArray[Any]]], shards: int = 1) -> None:
    if shards == 1:
        write_safetensors(path / "model.safetensors", weights)
        return
    places: dict[str, str] = {}
    for i in range(shards):
        name = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(path / name, weights[i::shards])
        places |= {key: name for key, _ in weights[i::shards]}
    write_json(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": places})


def their_weights(config: GPT2Config, seed: int, dtype: str) -> Iterator[tuple[str, NDArray[Any]]]:
    """Each parameter under transformers' name, Conv1D matrices [in, out]."""
    ours = dict(random_weights(config, [seed, 0]))
    for name, theirs, transposed in names(config):
        w = ours[name].T if transposed else ours[name]
        yield theirs, rounded(w, dtype) if "16" in dtype else w.astype(dtype)


def their_head(
    labels: int, units: int, seed: int = 0, dtype: str = "float32", *, of_tokens: bool = False
) -> Iterator[tuple[str, NDArray[Any]]]:
    """The parameters of a classifier's head."""
    rng = np.random.default_rng([seed, 1])
    name = "classifier" if of_tokens else "score"
    for part, shape in (("weight", (labels, units)), ("bias", (labels,))):
        w = (0.3 * rng.standard_normal(shape)).astype(np.float32)
        if part == "weight" or of_tokens:
            yield f"{name}.{part}", rounded(w, dtype) if "16" in dtype else w.astype(dtype)


def rounded(w: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    if dtype == "float16":
        return w.astype(np.float16)
    # bfloat16, of which numpy knows nothing, is the upper half of a float32.
    return (np.ascontiguousarray(w).view(np.uint32) >> 16).astype(np.uint16).view("V2")
