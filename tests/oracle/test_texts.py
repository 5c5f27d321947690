"""Directories of Hugging Face's kind answer with the texts of transformers' `generate`: those
kept beside this file, and those of transformers itself."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from common.parameters import Parameters
from engine.engine import Engine
from engine.settings import Settings
from tests.engine.engines import Request, make_talkative
from tests.engine.hugging_face import KINDS, make_hugging_face
from tests.oracle import oracle
from tests.oracle.comparison import BACKENDS, TOLERANCE
from tests.oracle.directories import DIRECTORIES, NEW_TOKENS, PROMPTS, make
from tests.scripts import command

pytestmark = pytest.mark.slow

GOLDEN = json.loads(Path(__file__).with_name("texts.json").read_text(encoding="utf-8"))
RANDOM = ("0", "1", "2", "3")
SEED = os.environ.get("ORACLE_SEED", "1")  # another one gives other directories


@pytest.fixture(params=BACKENDS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with closing(
        Engine(Settings(backend=request.param, precision="fp32", memory_mib=512))
    ) as engine:
        yield engine


@pytest.mark.parametrize("name", DIRECTORIES)
def test_texts_are_those_of_transformers(engine: Engine, name: str, tmp_path: Path) -> None:
    agrees(engine, make(name, tmp_path), GOLDEN[name])


def agrees(engine: Engine, folder: Path, answers: dict[str, Any]) -> None:
    name = folder.name
    engine.load(name, str(folder))
    model_own = vars(engine.parameters(name, {"max_new_tokens": NEW_TOKENS}))
    parameters = {n: v for n, v in model_own.items() if v != vars(Parameters())[n]}
    requests = {text: Request(engine, name, text, **parameters) for text in answers}
    for prompt, answer in answers.items():
        found = requests[prompt].wait()
        assert found.error is None
        assert found.prompt == answer["ids"]
        if answer["margin"] >= 2 * TOLERANCE:  # else the oracle's choice was between equals
            assert (found.ids(), found.text()) == (answer["new"], answer["text"]), prompt
    engine.unload(name)


def random_options(rng: random.Random) -> dict[str, Any]:
    """Draw random options of `make_hugging_face`."""
    heads = rng.randint(1, 6)
    return {
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
        "config": {
            "tie_word_embeddings": rng.random() < 0.5,
            "scale_attn_by_inverse_layer_idx": rng.random() < 0.3,
        },
    }


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Any]:
    """Directories, and what transformers answers with each, all in one run."""
    root = tmp_path_factory.mktemp("asked")
    prompts: dict[Path, Sequence[str]] = {}
    for name in RANDOM:
        options = random_options(random.Random(f"{SEED}-{name}"))  # noqa: S311
        print(name, options)  # shown when a test fails
        prompts[make_hugging_face(root / name, **options)] = PROMPTS
    prompts[make_hugging_face(root / "torch", seed=11)] = PROMPTS
    v1 = make_talkative(root / "v1", vocab=160, end_like=60)
    done = command.run("convert", v1, root / "hf", "--to", "hf")
    assert done.returncode == 0, done.stderr
    prompts[root / "hf"] = [prompt for prompt in PROMPTS if not prompt.startswith("<")]
    files = (root / "prompts.json", root / "texts.json")
    files[0].write_text(json.dumps({str(p): each for p, each in prompts.items()}), encoding="utf-8")
    oracle.run("-m", "tests.oracle.make_texts", *files)
    answers = json.loads(files[1].read_text(encoding="utf-8"))
    save = (
        "import sys, torch; from transformers import AutoModelForCausalLM as M;"
        "m = M.from_pretrained(sys.argv[1]); torch.save(m.state_dict(), sys.argv[2])"
    )
    oracle.run("-c", save, root / "torch", root / "torch" / "pytorch_model.bin")
    (root / "torch" / "model.safetensors").unlink()
    answers[str(v1)] = answers.pop(str(root / "hf"))
    return {Path(folder): each for folder, each in answers.items()}


@pytest.mark.oracle
@pytest.mark.parametrize("name", [*RANDOM, "v1", "torch"])
def test_texts_agree_with_transformers(engine: Engine, name: str, asked: dict[Path, Any]) -> None:
    """With random directories, a converted v1 model, and one that torch saved."""
    [(folder, answers)] = [(p, each) for p, each in asked.items() if p.name == name]
    agrees(engine, folder, answers)
