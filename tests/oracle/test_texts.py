"""Directories of Hugging Face's kind answer with the texts of transformers' `generate`.

The first tests hold the engine against texts kept beside this file, the last one against
transformers itself (ORACLE_PYTHON, see test_live).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.parameters import Parameters
from engine.engine import Engine
from engine.settings import Settings
from tests.engine.engines import Request, make_talkative
from tests.engine.hugging_face import KINDS
from tests.oracle.comparison import BACKENDS, TOLERANCE
from tests.oracle.directories import DIRECTORIES, PROMPTS, Directory

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
GOLDEN = json.loads((HERE / "texts.json").read_text(encoding="utf-8"))
ORACLE_TIMEOUT_S = 300
RANDOM_DIRECTORIES = 4
SEED = os.environ.get("ORACLE_SEED", "1")  # another one gives other directories


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    precision = "fp32"
    engine = Engine(Settings(backend=request.param, precision=precision, memory_mib=512))
    try:
        yield engine
    finally:
        engine.close()


@pytest.mark.parametrize("directory", DIRECTORIES, ids=lambda directory: directory.name)
def test_texts_are_those_of_transformers(
    engine: Engine, directory: Directory, tmp_path: Path
) -> None:
    agrees(engine, directory.make(tmp_path), GOLDEN[directory.name])


def test_the_golden_texts_are_of_these_directories() -> None:
    assert {d.name: set(d.prompts) for d in DIRECTORIES} == {n: set(t) for n, t in GOLDEN.items()}


def test_the_golden_texts_test_something() -> None:
    """Held-back characters, skipped special tokens, early ends, texts that do not stand still."""
    answers = [answer for texts in GOLDEN.values() for answer in texts.values()]
    assert all(answer["margin"] > 2 * TOLERANCE for answer in answers)
    assert any("\ufffd" in answer["text"] for answer in answers)
    assert any("🙂" in answer["text"] for answer in answers)
    assert any(len(answer["new"]) < 40 for answer in answers)
    assert all(len(set(answer["new"])) > 3 for answer in answers)
    assert GOLDEN["ends"][PROMPTS[0]]["ids"][0] == 0  # the begin token, as tokenizer.json says
    assert GOLDEN["kogpt2-v2"][PROMPTS[0]]["ids"][0] != 0


def agrees(engine: Engine, folder: Path, answers: dict[str, Any], new_tokens: int = 40) -> None:
    name = folder.name
    engine.load(name, str(folder))
    model_own = vars(engine.parameters(name, {"max_new_tokens": new_tokens}))
    parameters = {n: v for n, v in model_own.items() if v != vars(Parameters())[n]}
    requests = {text: Request(engine, name, text, **parameters) for text in answers}
    for prompt, answer in answers.items():
        found = requests[prompt].wait()
        assert found.error is None
        assert found.prompt == answer["ids"]
        if answer["margin"] < 2 * TOLERANCE:
            continue  # the oracle's own choice was the toss of a coin
        assert found.ids() == answer["new"], prompt
        assert found.text() == answer["text"], prompt
    engine.unload(name)


def both_agree(folder: Path, answers: dict[str, Any]) -> None:
    """With each backend's own engine."""
    for backend in BACKENDS:
        engine = Engine(Settings(backend=backend, precision="fp32", memory_mib=512))
        try:
            agrees(engine, folder, answers)
        finally:
            engine.close()


def random_directory(index: int, rng: random.Random) -> Directory:
    heads = rng.randint(1, 6)
    config = {
        "tie_word_embeddings": rng.random() < 0.5,
        "scale_attn_by_inverse_layer_idx": rng.random() < 0.3,
    }
    options = {
        "kind": rng.choice(KINDS),
        "layers": rng.randint(1, 4),
        "heads": heads,
        "units": heads * rng.choice((8, 10, 16)),
        "hidden": rng.randint(32, 200),
        "vocab": rng.randint(700, 900),
        "activation": rng.choice(("gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh")),
        "dtype": rng.choice(("float32", "float16", "bfloat16")),
        "shards": rng.choice((1, 2)),
        "seed": rng.randrange(1 << 32),
        "config": config,
    }
    return Directory(f"random-{index}", options)


@pytest.mark.oracle
@pytest.mark.parametrize("index", range(RANDOM_DIRECTORIES))
def test_texts_agree_with_transformers_on_directories_chosen_at_random(
    index: int, tmp_path: Path
) -> None:
    interpreter = os.environ.get("ORACLE_PYTHON")
    assert interpreter, "ORACLE_PYTHON must name the Python of the oracle's environment"
    directory = random_directory(index, random.Random(f"{SEED}-{index}"))  # noqa: S311
    print(directory)  # shown when the test fails
    folder = directory.make(tmp_path)
    answers = ask_oracle(folder, list(PROMPTS), tmp_path)
    both_agree(folder, answers)


@pytest.mark.oracle
def test_a_converted_v1_model_says_the_same_in_transformers(tmp_path: Path) -> None:
    v1 = make_talkative(tmp_path / "v1", vocab=160, end_like=60)
    command = [sys.executable, "-m", "scripts.cli", "convert", str(v1), str(tmp_path / "hf")]
    command += ["--to", "hf"]
    subprocess.run(command, cwd=HERE.parents[1], check=True, timeout=120, capture_output=True)
    prompts = [prompt for prompt in PROMPTS if not prompt.startswith("<")]

    answers = ask_oracle(tmp_path / "hf", prompts, tmp_path)

    both_agree(v1, answers)


@pytest.mark.oracle
def test_what_torch_saves_of_a_model_of_transformers_is_read(tmp_path: Path) -> None:
    folder = Directory("torch", {"seed": 11}).make(tmp_path)
    save = (
        "import sys, torch; from transformers import AutoModelForCausalLM as M;"
        "m = M.from_pretrained(sys.argv[1]); torch.save(m.state_dict(), sys.argv[2])"
    )
    path = folder / "pytorch_model.bin"
    command = [os.environ["ORACLE_PYTHON"], "-c", save, str(folder), str(path)]
    subprocess.run(command, check=True, timeout=ORACLE_TIMEOUT_S, capture_output=True)
    answers = ask_oracle(folder, list(PROMPTS), tmp_path)
    (folder / "model.safetensors").unlink()
    engine = Engine(Settings(backend="mxnet", precision="fp32", memory_mib=512))
    try:
        agrees(engine, folder, answers)
    finally:
        engine.close()


def ask_oracle(folder: Path, prompts: list[str], work: Path, new_tokens: int = 40) -> Any:
    """What transformers answers with this directory."""
    (work / "prompts.json").write_text(json.dumps(prompts), encoding="utf-8")
    command = [str(Path(os.environ["ORACLE_PYTHON"]).absolute()), "-m", "tests.oracle.make_texts"]
    command += ["--directory", str(folder), "--prompts", str(work / "prompts.json")]
    command += ["--new-tokens", str(new_tokens), "--out", str(work / "texts.json")]
    done = subprocess.run(
        command,
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=ORACLE_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads((work / "texts.json").read_text(encoding="utf-8"))
