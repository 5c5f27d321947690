"""Directories of Hugging Face's kind and the prompts that the oracle continues with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.engine.hugging_face import make_hugging_face

PROMPTS = (
    "안녕하세요. 오늘은",
    "🙂 안녕 😤",
    "가족 👩‍👩‍👧 사진",
    "<usr>한국어 언어 모델<sys>",
    "The quick 갈색 여우",
)
NEW_TOKENS = 40
ADDED = {"additional_special_tokens": ["<unused0>", "<extra>"]}
SCALED = {
    "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
    "reorder_and_upcast_attn": True,
}
UNTIED = {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-4}
OLDER = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3, "bad_words_ids": [[300], [9, 8]]}
ENDS = {"eos_token_id": [1, *range(300, 320)], "repetition_penalty": 1.3}

# What `make_hugging_face` is given, by name: every way in which such directories differ, which are
# tokenizer, activation, precision, flags, shards, ends.
DIRECTORIES: dict[str, dict[str, Any]] = {
    "kogpt2-v2": {"kind": "metaspace", "seed": 1, "tokenizer_config": ADDED},
    "byte-level": {"kind": "byte-level", "activation": "gelu", "seed": 2},
    "char-bpe": {"kind": "char-bpe", "dtype": "float16", "heads": 2, "seed": 3},
    "byte-fallback": {"kind": "byte-fallback", "dtype": "bfloat16", "seed": 4},
    "untied": {
        **{"kind": "byte-level", "activation": "gelu_pytorch_tanh", "hidden": 96, "seed": 5},
        "config": UNTIED,
    },
    "scaled": {
        **{"layers": 3, "units": 40, "heads": 5, "activation": "gelu_fast", "shards": 3, "seed": 6},
        "config": SCALED,
    },
    "ends": {
        **{"kind": "byte-level", "begins": True, "generation_config": ENDS, "seed": 7},
        "tokenizer_config": {"add_bos_token": False},
    },
    "older": {  # without a generation_config.json
        **{"kind": "byte-level", "begins": True, "seed": 8, "config": OLDER},
        "tokenizer_config": {"split_special_tokens": True},
    },
}


def make(name: str, folder: Path) -> Path:
    return make_hugging_face(folder / name, **DIRECTORIES[name])
