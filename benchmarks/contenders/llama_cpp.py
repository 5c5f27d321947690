"""Contender: llama.cpp with Q8_0 weights. Runs in the environment of the peers.

The GGUF file is written here from the artifact. llama.cpp's GPT-2 knows the tanh form of GELU only,
so its text differs a little; the work is the same.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.contenders.logits import logits_command
from benchmarks.worker import Clock, Started, generation
from common.model_files import ADAPTER
from engine.artifacts import artifact as artifacts
from engine.artifacts.adapter import BASE_NAMES, Adapter
from engine.artifacts.adapter import read as read_adapter
from engine.artifacts.artifact import Artifact
from engine.artifacts.open import open_artifact
from testbed import machine

BLOCKS = {
    "attn_norm": artifacts.ATTENTION_NORM,
    "attn_qkv": artifacts.QKV,
    "attn_output": artifacts.ATTENTION_OUT,
    "ffn_norm": artifacts.FFN_NORM,
    "ffn_up": artifacts.FFN_HIDDEN,
    "ffn_down": artifacts.FFN_OUT,
}
FLOATS = ctypes.POINTER(ctypes.c_float)
ROWS = 8
CONTEXT = 128  # tokens of a row; more than any generation here has
# llama.cpp's products with AMX end the process here (SIGILL or SIGSEGV, llama-cpp-python 0.3.36).
CRASHES_ON_AMX = "amx_int8" in machine.instruction_sets()


def tensors(artifact: Artifact) -> Iterator[tuple[str, Any, bool]]:
    """Yield each tensor's GGUF name, its array, and whether to quantize it."""
    w = artifact.weights
    yield "token_embd.weight", w[artifacts.EMBEDDING], True  # also the output projection
    yield "position_embd.weight", w[artifacts.POSITIONS], False
    yield "output_norm.weight", w[f"{artifacts.FINAL_NORM}.gamma"], False
    yield "output_norm.bias", w[f"{artifacts.FINAL_NORM}.beta"], False
    for i in range(artifact.config.num_layers):
        for theirs, ours in BLOCKS.items():
            kinds = ("gamma", "beta") if theirs.endswith("norm") else ("weight", "bias")
            weight, bias = (w[f"{ours.format(i)}.{kind}"] for kind in kinds)
            yield f"blk.{i}.{theirs}.weight", weight, weight.ndim == 2
            yield f"blk.{i}.{theirs}.bias", bias, False


def export(artifact: Artifact, path: Path) -> None:
    import gguf

    c, q8 = artifact.config, gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_context_length(c.max_length)
    writer.add_embedding_length(c.units)
    writer.add_feed_forward_length(c.hidden_size)
    writer.add_block_count(c.num_layers)
    writer.add_head_count(c.num_heads)
    writer.add_layer_norm_eps(c.layer_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_vocab_size(c.vocab_size)
    # Only ids are exchanged, but llama.cpp's server needs a text for each.
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"{i} " for i in range(c.vocab_size)])
    writer.add_token_scores([0.0] * c.vocab_size)
    writer.add_token_types([gguf.TokenType.NORMAL] * c.vocab_size)
    writer.add_add_bos_token(False)
    for name, array, quantized in tensors(artifact):
        array = array.astype(np.float32)
        if quantized:
            writer.add_tensor(name, gguf.quants.quantize(array, q8), raw_dtype=q8)
        else:
            writer.add_tensor(name, array)
    _write(writer)


def export_adapter(adapter: Adapter, path: Path) -> None:
    """Write an adapter as a GGUF file in fp16."""
    import gguf

    theirs = {ours: name for name, ours in BLOCKS.items()}
    (rank,) = {tensor.shape[0] for name, tensor in adapter.index.items() if ".down" in name}
    (scale,) = set(adapter.scales.values())
    writer = gguf.GGUFWriter(path, "gpt2")
    writer.add_type(gguf.GGUFType.ADAPTER)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, scale * rank)
    for module in adapter.scales:
        layer, product = module.split(".")
        name = f"blk.{layer}.{theirs[BASE_NAMES[product]]}.weight"
        for ours, part in (("down", "lora_a"), ("up", "lora_b")):
            weight = adapter.weights[f"{module}.{ours}"].astype(np.float16)
            writer.add_tensor(f"{name}.{part}", np.ascontiguousarray(weight))
    _write(writer)


def _write(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def start(path: str, threads: str) -> Started:
    import llama_cpp as lib

    lib.llama_backend_init()
    parameters = lib.llama_model_default_params()
    parameters.use_extra_bufts = not CRASHES_ON_AMX
    model = lib.llama_model_load_from_file(path.encode(), parameters)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {path}")
    options = lib.llama_context_default_params()
    options.n_ctx = CONTEXT * ROWS
    options.n_seq_max = ROWS
    options.n_threads = options.n_threads_batch = int(threads)
    context = lib.llama_init_from_model(model, options)
    vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(model))
    batch = lib.llama_batch_init(options.n_ctx, 0, 1)

    def run(rows: list[tuple[int, int, Sequence[int]]], count: int = 1) -> list[NDArray[Any]]:
        """Append ids to rows, given as (row, its length, ids).

        Returns the logits after the last `count` ids of each row, until the next call.
        """
        n, wanted = 0, []
        for row, begin, ids in rows:
            for i, token in enumerate(ids):
                batch.token[n], batch.pos[n] = token, begin + i
                batch.n_seq_id[n], batch.seq_id[n][0] = 1, row
                batch.logits[n] = i >= len(ids) - count
                if batch.logits[n]:
                    wanted.append(n)
                n += 1
        batch.n_tokens = n
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode failed")
        logits = (ctypes.cast(lib.llama_get_logits_ith(context, at), FLOATS) for at in wanted)
        return [np.ctypeslib.as_array(each, (vocabulary,)) for each in logits]

    def next_ids(rows: list[tuple[int, int, Sequence[int]]]) -> list[int]:
        return [int(np.argmax(logits)) for logits in run(rows)]

    def clear() -> None:
        lib.llama_memory_clear(lib.llama_get_memory(context), True)

    def generate(prompts: list[list[int]], new_tokens: int, clock: Clock) -> list[list[int]]:
        clear()
        new = next_ids([(row, 0, prompt) for row, prompt in enumerate(prompts)])
        made = [[token] for token in new]
        clock.step()
        for step in range(new_tokens - 1):
            begin = len(prompts[0]) + step
            new = next_ids([(row, begin, [token]) for row, token in enumerate(new)])
            for row, token in zip(made, new, strict=True):
                row.append(token)
            clock.step()
        return made

    def logits_after(ids: Sequence[int], count: int) -> NDArray[Any]:
        clear()
        return np.stack(run([(0, 0, ids)], count))

    about = {
        "version": f"llama-cpp-python {metadata.version('llama-cpp-python')}",
        "weight_bytes": lib.llama_model_size(model),
    }
    return about, {"generate": generation(generate), "logits": logits_command(logits_after)}


if __name__ == "__main__":  # writes a model's or an adapter's folder as a GGUF file
    source, target = map(Path, sys.argv[1:])
    if (source / ADAPTER).exists():
        export_adapter(read_adapter(source), target)
    else:
        export(open_artifact(source), target)
