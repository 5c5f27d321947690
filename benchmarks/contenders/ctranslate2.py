"""Contender: CTranslate2 in int8. Runs in the environment of the peers."""

from __future__ import annotations

import json
from pathlib import Path

import ctranslate2

from benchmarks.worker import Clock, Started, generation


def start(folder: str, threads: str) -> Started:
    names = json.loads((Path(folder) / "vocabulary.json").read_text(encoding="utf-8"))
    model = ctranslate2.Generator(
        folder, device="cpu", compute_type="int8", intra_threads=int(threads)
    )

    def generate(prompts: list[list[int]], new_tokens: int, clock: Clock) -> list[list[int]]:
        done = [0]

        def on_token(result: ctranslate2.GenerationStepResult) -> bool:
            done[0] += 1
            if done[0] % len(prompts) == 0:  # one call for each row
                clock.step()
            return False

        results = model.generate_batch(
            [[names[i] for i in prompt] for prompt in prompts],
            min_length=new_tokens,
            max_length=new_tokens,
            include_prompt_in_result=False,
            callback=on_token,
        )
        return [result.sequences_ids[0] for result in results]

    about = {
        "version": f"ctranslate2 {ctranslate2.__version__}",
        "weight_bytes": (Path(folder) / "model.bin").stat().st_size,
    }
    return about, {"generate": generation(generate)}
