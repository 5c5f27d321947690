"""Loads a KoGPT2 v1 model and its vocabulary in one call."""

from __future__ import annotations

import os
import re
from typing import Any

import gluonnlp as nlp
import mxnet as mx

from .model.gpt import GPT2Model
from .utils import find, get_tokenizer

HEAD_SIZE = 64


def get_mxnet_kogpt2_model(ctx: Any = None, cachedir: str = "~/kogpt2/") -> tuple[Any, Any]:
    """Load the network with the parameters in the model's folder, and its vocabulary."""
    params = find("mxnet_kogpt2_9250bedc00.params", "*.params", cachedir)
    return get_kogpt2_model(str(params), get_tokenizer(cachedir), ctx)


def get_kogpt2_model(
    model_file: str | os.PathLike[str], vocab_file: str, ctx: Any = None
) -> tuple[Any, Any]:
    vocabulary = nlp.vocab.BERTVocab.from_sentencepiece(
        vocab_file,
        mask_token=None,
        sep_token=None,
        cls_token=None,
        unknown_token="<unk>",  # noqa: S106  a token of text
        padding_token="<pad>",  # noqa: S106
        bos_token="<s>",  # noqa: S106
        eos_token="</s>",  # noqa: S106
    )
    arrays = mx.nd.load(str(model_file))
    max_length, units = arrays["_pos_embed.weight"].shape
    layers = {m[1] for m in (re.match(r"_attn_ln\.(\d+)\.", name) for name in arrays) if m}
    model = GPT2Model(
        units=units,
        vocab_size=arrays["_embed.weight"].shape[0],
        max_length=max_length,
        num_layers=len(layers),
        num_heads=max(units // HEAD_SIZE, 1),
    )
    model.load_parameters(str(model_file), ctx=ctx or mx.cpu())
    return model, vocabulary
