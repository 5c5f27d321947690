"""Contender: Hugging Face transformers in fp32; and the export that other peers convert from.

Runs in the environment of the peers. The loop is `generate`'s without its generality: the model
itself with its own K/V cache, logits of the last position only.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from benchmarks.worker import Channel, Clock, generation
from engine.artifacts import artifact as artifacts
from engine.artifacts.artifact import Artifact
from engine.artifacts.open import open_artifact

# Names there -> here; Conv1D's weights are [in, out].
PROJECTIONS = {
    "attn.c_attn": artifacts.QKV,
    "attn.c_proj": artifacts.ATTENTION_OUT,
    "mlp.c_fc": artifacts.FFN_HIDDEN,
    "mlp.c_proj": artifacts.FFN_OUT,
}
NORMS = {"ln_1": artifacts.ATTENTION_NORM, "ln_2": artifacts.FFN_NORM}


def export(artifact: Artifact, folder: Path) -> None:
    """Writes the artifact as `save_pretrained` does, with a tokenizer that names the ids."""
    c, w = artifact.config, artifact.weights
    config = transformers.GPT2Config(
        vocab_size=c.vocab_size,
        n_positions=c.max_length,
        n_embd=c.units,
        n_layer=c.num_layers,
        n_head=c.num_heads,
        n_inner=c.hidden_size,
        activation_function=c.activation,
        layer_norm_epsilon=c.layer_norm_eps,
        bos_token_id=2,
        eos_token_id=3,
    )
    arrays = {
        "transformer.wte.weight": w[artifacts.EMBEDDING],
        "lm_head.weight": w[artifacts.EMBEDDING],
        "transformer.wpe.weight": w[artifacts.POSITIONS],
        "transformer.ln_f.weight": w[f"{artifacts.FINAL_NORM}.gamma"],
        "transformer.ln_f.bias": w[f"{artifacts.FINAL_NORM}.beta"],
    }
    for i in range(c.num_layers):
        layer = f"transformer.h.{i}"
        for theirs, ours in PROJECTIONS.items():
            arrays[f"{layer}.{theirs}.weight"] = w[f"{ours.format(i)}.weight"].T
            arrays[f"{layer}.{theirs}.bias"] = w[f"{ours.format(i)}.bias"]
        for theirs, ours in NORMS.items():
            arrays[f"{layer}.{theirs}.weight"] = w[f"{ours.format(i)}.gamma"]
            arrays[f"{layer}.{theirs}.bias"] = w[f"{ours.format(i)}.beta"]
    model = transformers.GPT2LMHeadModel(config)
    tensors = {name: torch.from_numpy(array.astype("float32")) for name, array in arrays.items()}
    missing, unexpected = model.load_state_dict(tensors, strict=False)
    assert not unexpected, unexpected
    assert all(name.endswith((".attn.bias", ".attn.masked_bias")) for name in missing), missing
    model.save_pretrained(folder)
    names = {name_of(i): i for i in range(c.vocab_size)}
    tokenizer = Tokenizer(WordLevel(names, unk_token=name_of(0)))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=name_of(0),
        bos_token=name_of(2),
        eos_token=name_of(3),
    ).save_pretrained(folder)


def name_of(token: int) -> str:
    """The token's name in tokenizers that never see text."""
    return f"t{token}"


def main() -> None:
    folder, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).eval()

    @torch.inference_mode()  # type: ignore[untyped-decorator]
    def generate(prompts: list[list[int]], new_tokens: int, clock: Clock) -> list[list[int]]:
        ids, past = torch.tensor(prompts), None
        made = []
        for _ in range(new_tokens):
            out = model(ids, past_key_values=past, use_cache=True, logits_to_keep=1)
            past = out.past_key_values
            ids = out.logits[:, -1].argmax(dim=-1, keepdim=True)  # (B, 1)
            made.append(ids[:, 0].tolist())
            clock.step()
        return [list(row) for row in zip(*made, strict=True)]

    about = {
        "version": f"transformers {transformers.__version__}, torch {torch.__version__}",
        "weight_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
    }
    Channel().serve(about, {"generate": generation(generate)})


def write(artifact: str, folder: str) -> None:
    export(open_artifact(artifact), Path(folder))


if __name__ == "__main__":
    write(*sys.argv[2:]) if sys.argv[1] == "--export" else main()
