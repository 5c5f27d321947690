"""Contender: CTranslate2 in int8. Runs in the environment of the peers."""

from __future__ import annotations

import sys
from pathlib import Path

import ctranslate2

from benchmarks.worker import Channel, Clock, generation

QUANTIZATION = "int8"


def export(source: str, folder: str) -> None:
    """Converts what transformers saved."""
    converter = ctranslate2.converters.TransformersConverter(source)
    converter.convert(folder, quantization=QUANTIZATION)


def main() -> None:
    folder, threads = sys.argv[1:]
    model = ctranslate2.Generator(
        folder, device="cpu", compute_type=QUANTIZATION, intra_threads=int(threads)
    )

    def generate(prompts: list[list[int]], new_tokens: int, clock: Clock) -> list[list[int]]:
        done = [0]

        def on_token(result: ctranslate2.GenerationStepResult) -> bool:
            done[0] += 1
            if done[0] % len(prompts) == 0:  # one call for each row
                clock.step()
            return False

        found = model.generate_batch(
            [[f"t{i}" for i in prompt] for prompt in prompts],
            min_length=new_tokens,
            max_length=new_tokens,
            include_prompt_in_result=False,
            callback=on_token,
        )
        return [result.sequences_ids[0] for result in found]

    about = {
        "version": f"ctranslate2 {ctranslate2.__version__}",
        "weight_bytes": (Path(folder) / "model.bin").stat().st_size,
    }
    Channel().serve(about, {"generate": generation(generate)})


if __name__ == "__main__":
    export(*sys.argv[2:]) if sys.argv[1] == "--export" else main()
