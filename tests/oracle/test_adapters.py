"""Adapters answer as PEFT answers with them in transformers: what it saves, in all its ways, beside
each other on one base."""

from __future__ import annotations

import itertools
import json
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from common.errors import ArtifactError
from engine.artifacts.adapter import read
from engine.artifacts.open import open_artifact
from engine.engine import Engine
from engine.settings import Settings
from tests.engine.engines import Pause, Request
from tests.engine.hugging_face import make_hugging_face
from tests.engine.sentences import SENTENCES
from tests.oracle import oracle
from tests.scripts.command import run

pytestmark = pytest.mark.oracle

TOLERANCE = 1e-3  # of log-probabilities
TIE = 2e-4  # of logits whose order is the toss of a coin
NEW = 8
TOP = 20
SHAPE: dict[str, Any] = {"layers": 3, "units": 64, "heads": 4, "vocab": 500, "seed": 12}
PROMPTS = ("안녕하세요. 오늘은", "고양이가 창가에", "The quick 갈색 여우")
TEXT = " ".join(SENTENCES[:4])
MODULES = ("c_attn", "attn.c_proj", "c_fc", "mlp.c_proj")
SUBSETS = [s for size in range(1, 5) for s in itertools.combinations(MODULES, size)]
RANKS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 40)
ALL = {"target_modules": [*MODULES]}


def lora(r: int = 8, **config: Any) -> dict[str, Any]:
    """Return the arguments of `make_adapters.make`; `|` adds to the configuration of PEFT."""
    return {"config": {"task_type": "CAUSAL_LM", "r": r, "target_modules": [*MODULES], **config}}


BIN: dict[str, Any] = {"save": {"safe_serialization": False}}
EMBEDDINGS: dict[str, Any] = {"save": {"save_embedding_layers": True}}
LATER = {"^transformer.h.1.mlp.c_fc": 31}
ORDER = {"mlp.c_proj": 64, "c_proj": 3}  # saved and read by the alphabet: `c_proj` is for both
SHORT_PATTERNS: dict[str, Any] = {
    "rank_pattern": {"c_attn": 3, "mlp.c_proj": 20},
    "alpha_pattern": {"c_fc": 40, "attn.c_proj": 1},
}
LONG_PATTERNS: dict[str, Any] = {
    "rank_pattern": {r"h\.[02]\..*c_proj": 5, r".*\.1\.attn\.c_attn": 1, "0.mlp.c_fc": 33},
    "alpha_pattern": {
        r"^transformer\.h\.0\.attn\.c_attn": 90,
        "transformer.h.(1|2).mlp.c_fc": 2,
        "proj": 1000,  # no name's end
        r"h\.2\.": 1000,
    },
}
OF_THE_TRANSFORMER: dict[str, Any] = {
    "alpha_pattern": {r"^h.0.attn.c_attn": 50, r"transformer.h.1.attn.c_attn": 900},
    "rank_pattern": {r"^h\.\d\.mlp": 900, r"^h\.\d\.mlp.c_fc": 2},
}
TRANSFORMER, CONVERTED = {"over": "transformer"}, {"converted": True}
FEW: dict[str, Any] = {"target_modules": ["c_attn", "c_fc"], "layers_to_transform": [1, 2]}
PISSA: dict[str, Any] = {"rank_pattern": {"c_fc": 6}, "alpha_pattern": {r"h.[01].mlp.c_fc": 3}}
ADAPTERS: dict[str, dict[str, Any]] = {
    **{
        f"{r} {' '.join(modules)}": lora(r, lora_alpha=1 + 5 * i, target_modules=[*modules])
        for i, (r, modules) in enumerate(zip(RANKS, SUBSETS, strict=True))
    },
    "rslora": lora(9, lora_alpha=11, use_rslora=True),
    "fraction": lora(6, lora_alpha=0.75, fan_in_fan_out=True, lora_dropout=0.1),
    "one layer": lora(lora_alpha=32, layers_to_transform=1),
    "layers": lora(lora_alpha=4, layers_to_transform=[0, 2], layers_pattern="h"),
    "all linear": lora(4, target_modules="all-linear", exclude_modules=["mlp.c_proj"]),
    "expression": lora(5, target_modules=r".*\.h\.[01]\.mlp\.c_(fc|proj)"),
    "no task": lora(task_type=None),
    "short patterns": lora(lora_alpha=12, **SHORT_PATTERNS),
    "long patterns": lora(lora_alpha=10, use_rslora=True, **LONG_PATTERNS),
    "patterns in order": lora(alpha_pattern=ORDER),
    "biases": lora(3, bias="lora_only"),
    "biases of a few": lora(5, bias="lora_only", use_rslora=True, **FEW) | {"name": "polite"},
    "biases that are added": lora(4, lora_alpha=12, lora_bias=True),
    "float16": lora(7, bias="lora_only") | {"dtype": "float16"},
    "bfloat16": lora(7, bias="lora_only") | {"dtype": "bfloat16"},
    "bin": lora(6, bias="lora_only") | BIN,
    "bin in float16": lora(12, lora_bias=True) | {"dtype": "float16", **BIN},
    "bin in bfloat16": lora(12, lora_alpha=3) | {"dtype": "bfloat16", "name": "bfloat", **BIN},
    "named": lora(2) | {"name": "lora_A"},
    "two": lora(2, bias="lora_only")
    | {"beside": {"other": lora(3, target_modules=["c_attn"])["config"]}},
    "sum": lora(3, lora_alpha=7)
    | {"beside": {"other": lora(4, use_rslora=True)["config"]}, "sum": True, "name": "first"},
    "of the transformer": lora(task_type=None, **OF_THE_TRANSFORMER) | TRANSFORMER,
    "without peft's model": lora(5, bias="lora_only", alpha_pattern=LATER) | {"over": "mixin"},
    # These are merged.
    "dora": lora(6, use_dora=True, bias="lora_only"),
    "dora with rslora": lora(4, use_dora=True, use_rslora=True, lora_alpha=3),
    "a head": lora(modules_to_save=["lm_head"]),
    "an embedding": lora(modules_to_save=["wte"]),
    "an embedding and a head": lora(modules_to_save=["wte", "lm_head", "wpe"]),
    "norms": lora(modules_to_save=["ln_f", "ln_1"], target_modules=["c_fc"]),
    "a layer": lora(modules_to_save=["1.mlp"], target_modules=["c_attn"]),
    "all biases": lora(bias="all", target_modules=["c_attn"]),
    "embeddings beside it": lora() | EMBEDDINGS,
    "tokens": lora(trainable_token_indices=[7, 499, 30]),
    "tokens of the transformer": lora(task_type=None, trainable_token_indices={"wte": [40, 5]})
    | TRANSFORMER,
    "tokens of the head": lora(trainable_token_indices={"lm_head": [9, 100, 11]}),
    "the same tokens of both": lora(trainable_token_indices={"wte": [9, 10], "lm_head": [9, 10]}),
    "tokens of each": lora(trainable_token_indices={"wte": [9, 10], "lm_head": [11]})
    | {"dtype": "float16", **BIN},
    "tokens beside an embedding that is saved": lora(trainable_token_indices=[7, 8]) | EMBEDDINGS,
    "gaussian": lora(4, init_lora_weights="gaussian"),
    "random": lora(4, init_lora_weights=False),
    "orthogonal": lora(4, init_lora_weights="orthogonal"),
    "mica": lora(4, init_lora_weights="mica"),
    "pissa, converted": lora(4, init_lora_weights="pissa", **PISSA) | CONVERTED,
    "pissa with rslora, converted": lora(4, init_lora_weights="pissa_niter_2", use_rslora=True)
    | CONVERTED,
}
# Options that PEFT saves in their own ways; of all pairs of them.
OPTIONS: dict[str, dict[str, Any]] = {
    "dora": lora(4, use_dora=True),
    "biases": lora(4, bias="lora_only"),
    "added biases": lora(4, lora_bias=True),
    "an embedding": lora(4, modules_to_save=["wte"]),
    "a head": lora(4, modules_to_save=["lm_head"]),
    "a norm": lora(4, modules_to_save=["ln_f"]),
    "tokens": lora(4, trainable_token_indices=[7, 30]),
    "embeddings beside it": lora(4) | EMBEDDINGS,
    "a larger vocabulary": lora(4) | {"vocabulary": 512},
    "few layers": lora(4, layers_to_transform=[1], use_rslora=True),
}
# Pairs that PEFT refuses, or cannot compute.
IMPOSSIBLE = ({"dora", "added biases"}, {"an embedding", "tokens"}, {"a head", "tokens"})


def both(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `make_adapters.make` for two options at once."""
    config = one["config"] | other["config"]
    saved = [s for each in (one, other) for s in each["config"].get("modules_to_save", [])]
    return {**one, **other, "config": config | ({"modules_to_save": saved} if saved else {})}


ADAPTERS |= {
    f"{one} and {other}": both(OPTIONS[one], OPTIONS[other])
    for one, other in itertools.combinations(OPTIONS, 2)
    if {one, other} not in IMPOSSIBLE
}
ROUTER = "router"
BASE = "base"  # the base itself
ASKED = (BASE, *ADAPTERS)
MERGED = ("long patterns", "biases that are added", "bfloat16", "dora", "norms", "tokens")

# By what the refusal says, what PEFT saves.
REFUSED: dict[str, dict[str, Any]] = {
    "holds base_model.model.transformer.wte.lora_embedding_A": lora(
        target_modules=["c_attn", "wte"]
    )
    | {"save": {"save_embedding_layers": False}},
    "holds base_model.model.lm_head.lora_A.weight": lora(target_modules=["c_attn", "lm_head"]),
    "target_parameters is ['attn.c_attn.weight']": lora(
        target_parameters=["attn.c_attn.weight"], target_modules=[]
    ),
    "alora_invocation_tokens is [5, 6]": lora(alora_invocation_tokens=[5, 6]),
    "init_lora_weights is 'pissa_niter_4'": lora(init_lora_weights="pissa_niter_4"),
    "init_lora_weights is 'olora'": lora(init_lora_weights="olora"),
    ".c_attn.lora_velora_embed, which is no LoRA matrix": lora(velora_config={}),
    "lora_monteclora_sampler": lora(monteclora_config={}),
    "rank 65 in layer 0, more than the 64 units": lora(65),
    "task_type is 'FEATURE_EXTRACTION'": lora(task_type="FEATURE_EXTRACTION") | TRANSFORMER,
    **{
        f"peft_type is '{kind}'": {"kind": config, "config": {"task_type": "CAUSAL_LM", **more}}
        for kind, config, more in (
            ("IA3", "IA3Config", {**ALL, "feedforward_modules": ["c_fc", "mlp.c_proj"]}),
            ("PREFIX_TUNING", "PrefixTuningConfig", {"num_virtual_tokens": 4}),
            ("PROMPT_TUNING", "PromptTuningConfig", {"num_virtual_tokens": 4}),
            ("P_TUNING", "PromptEncoderConfig", {"num_virtual_tokens": 4}),
            ("LN_TUNING", "LNTuningConfig", {"target_modules": ["ln_1", "ln_f"]}),
            ("ADALORA", "AdaLoraConfig", {**ALL, "total_step": 10}),
            ("LOHA", "LoHaConfig", {"target_modules": ["lm_head"]}),
        )
    },
}


@dataclass
class Made:
    """An adapter that PEFT made on a base, and PEFT's answers with it."""

    root: Path
    base: Path
    answers: dict[str, Any]
    logprobs: dict[str, NDArray[Any]]


def folder_of(root: Path, name: str) -> Path:
    """Return an adapter's folder: PEFT saves a named one in a folder of that name."""
    options = (ADAPTERS | REFUSED).get(name, {})
    path = root / str([*ADAPTERS, *REFUSED].index(name)) if options else root / name
    own = "sum" if options.get("sum") else options.get("name", "default")
    return path if own == "default" else path / own


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    root = tmp_path_factory.mktemp("peft")
    base = make_hugging_face(root / "바탕", **SHAPE)
    plan = {
        "base": base,
        "prompts": PROMPTS,
        "text": TEXT,
        "make": {
            name: {"path": root / str(i), "seed": i, **options}
            for i, (name, options) in enumerate((ADAPTERS | REFUSED).items())
        },
        "route": {ROUTER: (root / ROUTER, [folder_of(root, "gaussian")])},
        "merge": {
            name: (folder_of(root, name), root / f"merged-{i}") for i, name in enumerate(MERGED)
        },
        "ask": {
            BASE: (base, "whole", 0),
            **{
                name: (folder_of(root, name), options.get("over", ""), options.get("vocabulary", 0))
                for name, options in ADAPTERS.items()
            },
        },
    }
    (root / "plan.json").write_text(json.dumps(plan, default=str), encoding="utf-8")
    oracle.run("-m", "tests.oracle.make_adapters", root / "plan.json")
    answers = json.loads((root / "answers.json").read_text(encoding="utf-8"))
    with np.load(root / "logprobs.npz") as file:
        return Made(root, base, answers, dict(file))


@pytest.fixture(scope="module")
def found(made: Made) -> dict[str, list[Request]]:
    """The engine's answers by name, to requests sent all at once.

    It is closed then: one in idleness gives the library's memory back, which another may be using.
    """
    with closing(new_engine()) as engine:
        engine.load(BASE, str(made.base))
        for name in ASKED[1:]:
            engine.load(name, str(folder_of(made.root, name)), base=str(made.base))
        with Pause(engine):
            requests = {name: ask(engine, name) for name in ASKED}
        return {name: [r.wait() for r in each] for name, each in requests.items()}


def new_engine() -> Engine:
    return Engine(Settings(backend="native", precision="fp32", memory_mib=512))


def ask(engine: Engine, name: str) -> list[Request]:
    """For what follows each prompt, and for what is likely in the text."""
    scored = {"max_new_tokens": 1, "logprobs": TOP, "decoder_input_details": True}
    return [
        *(Request(engine, name, prompt, max_new_tokens=NEW) for prompt in PROMPTS),
        Request(engine, name, TEXT, **scored),
    ]


def agrees(found: list[Request], answer: dict[str, Any], logprobs: NDArray[Any]) -> None:
    for request, new, margins in zip(found, answer["new"], answer["margins"], strict=False):
        assert request.error is None
        sure = next((i for i, margin in enumerate(margins) if margin < TIE), len(new))
        assert request.ids()[:sure] == new[:sure]
    assert_scores(found[-1], answer["ids"], logprobs)


def assert_scores(request: Request, ids: list[int], logprobs: NDArray[Any]) -> None:
    """The log-probability of each token of the text, and of the likeliest in its place."""
    assert request.error is None
    assert request.prompt == ids
    [first] = request.tokens
    scores = [scores for _, scores in first.prefill[1:]] + [first.logprobs]
    for scored, token, wanted in zip(scores, [*ids[1:], first.id], logprobs, strict=True):
        assert scored is not None
        for i, logprob in [(token, scored.chosen), *scored.top]:
            assert abs(logprob - wanted[i]) < TOLERANCE


@pytest.mark.parametrize("name", ASKED)
def test_an_adapter_answers_as_peft_does(
    made: Made, found: dict[str, list[Request]], name: str
) -> None:
    agrees(found[name], made.answers[name], made.logprobs[name])


def test_what_is_compared_is_of_many_adapters_that_change_the_text(made: Made) -> None:
    texts = {json.dumps(answer["new"]) for answer in made.answers.values()}
    assert len(texts) == len(made.answers) == len(ADAPTERS) + 1
    margins = [m for answer in made.answers.values() for each in answer["margins"] for m in each]
    assert np.mean(np.array(margins) < TIE) < 0.01


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_served_is_refused_as_peft_saves_it(made: Made, reason: str) -> None:
    with closing(new_engine()) as engine:
        with pytest.raises(ArtifactError) as caught:
            engine.load("bad", str(folder_of(made.root, reason)), base=str(made.base))
        assert reason in caught.value.message
        assert not engine.models()


def test_a_router_of_adapters_is_refused(made: Made) -> None:
    """A router's matrices have the same names as an adapter's."""
    with pytest.raises(ArtifactError, match="arrow_config is"):
        read(made.root / ROUTER / "arrow_router")


@pytest.mark.parametrize("name", MERGED)
def test_a_merged_adapter_is_what_peft_makes_of_it(made: Made, tmp_path: Path, name: str) -> None:
    convert(folder_of(made.root, name), tmp_path / "whole", "whole", "--base", made.base)
    ours = open_artifact(tmp_path / "whole")
    theirs = open_artifact(made.root / f"merged-{MERGED.index(name)}")
    before = open_artifact(made.base)
    assert ours.config == theirs.config
    changed = 0
    for weight in theirs.weights:
        np.testing.assert_allclose(
            ours.weights[weight], theirs.weights[weight], rtol=0, atol=1e-6, err_msg=weight
        )
        changed += not np.array_equal(theirs.weights[weight], before.weights[weight])
    assert changed >= 11


def convert(source: Path, target: Path, to: str, *options: str | Path) -> None:
    done = run("convert", source, target, "--to", to, *options)
    assert done.returncode == 0, done.stderr
