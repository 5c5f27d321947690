"""Contender: the loop of the AWS guides to KoGPT2, which our `mxnet` backend replaces.

For every token it tokenizes the whole text again, runs the model on all ids without a cache, takes
the most likely token of every position, and appends the last one's piece to the text. One text at
a time; MXNet has its own defaults, except for one OpenMP thread per core.
"""

from __future__ import annotations

import sentencepiece

from benchmarks.worker import Clock, Started, generation
from common.mxnet_compat import mx
from engine.artifacts.open import open_artifact
from engine.backends.mxnet.gpt2 import GPT2


def start(folder: str) -> Started:
    artifact = open_artifact(folder)
    model = GPT2(artifact.config, artifact.weights)
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(artifact.tokenizer_file))
    pieces = [tokenizer.id_to_piece(i) for i in range(len(tokenizer))]
    vocabulary = {piece: i for i, piece in enumerate(pieces)}

    def complete(prompt: list[int], new_tokens: int, clock: Clock) -> list[int]:
        text = "".join(pieces[i] for i in prompt[1:])
        made: list[int] = []
        tokens = tokenizer.encode(text, out_type=str)
        for _ in range(new_tokens):
            ids = [vocabulary["<s>"]] + [vocabulary[token] for token in tokens]
            assert len(ids) == len(prompt) + len(made)
            logits = model(mx.nd.array(ids).expand_dims(axis=0))
            likeliest = mx.nd.argmax(logits, axis=-1).squeeze(axis=0).astype("int").asnumpy()
            piece = [pieces[i] for i in likeliest.tolist()][-1]
            made.append(vocabulary[piece])
            text += piece.replace("\u2581", " ")
            tokens = tokenizer.encode(text, out_type=str)
            clock.step()
        return made

    def generate(prompts: list[list[int]], new_tokens: int, clock: Clock) -> list[list[int]]:
        assert len(prompts) == 1
        return [complete(prompts[0], new_tokens, clock)]

    about = {"version": f"mxnet {mx.__version__}", "weight_bytes": artifact.fp32_bytes}
    return about, {"generate": generation(generate)}
