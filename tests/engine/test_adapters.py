"""Adapters share their base's weights and steps, and answer as the whole models that they make."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import ArtifactError, InvalidRequest, ModelAlreadyLoaded, ModelNotFound
from common.mxnet_compat import mx
from engine.artifacts.adapter import BASE_NAMES
from engine.artifacts.artifact import ATTENTION_OUT, EMBEDDING, FFN_OUT, OUTPUT
from engine.artifacts.merged import merge
from engine.artifacts.open import open_artifact
from engine.backends.interface import Piece
from engine.backends.mxnet.gpt2 import GPT2
from engine.engine import Engine
from engine.native.adapter import load_adapter
from engine.native.model import NativeModel
from engine.native.prepared import prepared
from engine.prepared.manifest import Manifests
from tests.engine.adapters import make_adapter, merged
from tests.engine.conftest import NewEngine
from tests.engine.engines import Pause, Request, make_talkative
from tests.engine.hugging_face import make_hugging_face
from tests.engine.sentences import SENTENCES

PROMPT = "오늘은 날씨가"
NEW = 24
# What one adapter has that another has not.
KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "attention": {"modules": ["attn.c_attn"], "rank": 16},
    "projections": {"modules": ["attn.c_proj", "mlp.c_proj"], "rank": 17},
    "one layer": {"layers": [1], "rank": 1},
    "biases": {"bias": True, "rank": 8},
    "halves": {"dtype": "float16", "rank": 5},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talkative(tmp_path_factory.mktemp("base") / "바탕", seed=7)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        kind: make_adapter(root / kind, base, seed=seed, **options)
        for seed, (kind, options) in enumerate(KINDS.items())
    }


@pytest.fixture(scope="module")
def wholes(
    base: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("wholes")
    return {kind: merged(root / kind, base, path) for kind, path in adapters.items()}


@pytest.fixture(params=["mxnet", "native"])
def engine(request: pytest.FixtureRequest, new_engine: NewEngine) -> Engine:
    return new_engine(memory_mib=64, backend=request.param, precision="fp32")


def load(engine: Engine, base: Path, adapters: dict[str, Path]) -> None:
    for kind, path in adapters.items():
        engine.load(kind, str(path), base=str(base))


def logits_of(model: NativeModel, ids: list[int], adapter: Any = None) -> Any:
    row = model.open_row()
    found = model.run([Piece(row, ids, len(ids), adapter)]).copy()
    model.close_row(row)
    return found


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_logits_are_those_of_the_merged_model(
    base: Path, adapters: dict[str, Path], wholes: dict[str, Path], precision: str
) -> None:
    ids = np.random.default_rng(0).integers(4, 150, 60).tolist()
    of_base = Manifests().open(base)
    model = NativeModel(prepared(of_base, precision, None))
    alone = logits_of(model, ids)
    for kind, path in adapters.items():
        adapter = load_adapter(Manifests().open_adapter(path), of_base, precision)
        found = logits_of(model, ids, adapter)
        whole = NativeModel(prepared(Manifests().open(wholes[kind]), "fp32", None))
        wanted = logits_of(whole, ids)
        whole.close()
        error = np.sqrt(np.mean((found - wanted) ** 2)) / wanted.std()
        assert error < (1e-5 if precision == "fp32" else 0.08), kind
        assert np.abs(found - alone).max() > 0.5 * wanted.std()  # it changes something
    model.close()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_row_is_the_same_bits_beside_rows_of_other_adapters(
    base: Path, adapters: dict[str, Path], precision: str
) -> None:
    of_base = Manifests().open(base)
    model = NativeModel(prepared(of_base, precision, None))
    packed = [
        None,
        *(load_adapter(Manifests().open_adapter(p), of_base, precision) for p in adapters.values()),
    ]
    rng = np.random.default_rng(1)
    rows = [(rng.integers(4, 150, 100).tolist(), packed[i % len(packed)]) for i in range(14)]
    alone = [logits_of(model, ids, adapter) for ids, adapter in rows]
    opened, done = [model.open_row() for _ in rows], [0] * len(rows)
    while any(count < 100 for count in done):
        chosen = [i for i in rng.permutation(len(rows)).tolist() if done[i] < 100]
        chosen = chosen[: rng.integers(1, len(chosen) + 1)]
        pieces = []
        for i in chosen:
            count = min(int(rng.choice([1, 1, 2, 30, 60])), 100 - done[i])
            ids, adapter = rows[i]
            pieces.append(Piece(opened[i], ids[done[i] : done[i] + count], count, adapter))
        logits, at = model.run(pieces), 0
        for i, piece in zip(chosen, pieces, strict=True):
            count = len(piece.ids)
            same = alone[i][done[i] : done[i] + count]
            assert logits[at : at + count].tobytes() == same.tobytes()
            done[i], at = done[i] + count, at + count
    model.close()


def test_adapters_and_their_base_answer_together_as_whole_models_do(
    engine: Engine, base: Path, adapters: dict[str, Path], wholes: dict[str, Path]
) -> None:
    load(engine, base, adapters)
    engine.load("base", str(base))
    for kind, path in wholes.items():
        engine.load(f"whole {kind}", str(path))
    engine.load("whole base", str(base), precision="fp32")
    names = [*KINDS, "base"]
    for prompt in SENTENCES[:3]:
        with Pause(engine):
            together = {
                name: Request(engine, name, prompt, max_new_tokens=NEW) for name in names * 2
            }
        wanted = {
            name: Request(engine, f"whole {name}", prompt, max_new_tokens=NEW).wait().text()
            for name in names
        }
        assert {name: request.wait().text() for name, request in together.items()} == wanted
    assert len(set(wanted.values())) == len(names)  # each its own


def test_forms_and_labels_of_adapters_are_those_of_whole_models(
    engine: Engine, base: Path, adapters: dict[str, Path], wholes: dict[str, Path]
) -> None:
    load(engine, base, adapters)
    for kind, path in wholes.items():
        engine.load(f"whole {kind}", str(path))
    labels = ["날씨가 참 좋습니다", "한국어 모델", "날씨가"]
    forms: list[dict[str, Any]] = [
        {"choice": labels, "choice_logprobs": True},
        {"regex": "[가-힣]{2,4} (책|물)"},
        {"choice": labels},
    ]

    def ask(prefix: str) -> dict[tuple[str, int], Request]:
        with Pause(engine):  # all in the same passes
            requests = {
                (kind, i): Request(engine, prefix + kind, PROMPT, max_new_tokens=60, **form)
                for kind in KINDS
                for i, form in enumerate(forms)
            }
        return {key: request.wait() for key, request in requests.items()}

    wanted = ask("whole ")
    for key, request in ask("").items():
        assert request.error is None
        assert request.text() == wanted[key].text()
        found, expected = (dict(r.tokens[-1].choices) for r in (request, wanted[key]))
        assert found == pytest.approx(expected, abs=1e-3)
        assert len(found) == (len(labels) if key[1] == 0 else 0)


def test_labels_with_characters_that_the_vocabulary_lacks_are_refused(
    engine: Engine, base: Path
) -> None:
    """All such characters are one token, with which two labels would be as likely."""
    engine.load("base", str(base))
    with pytest.raises(InvalidRequest, match="has no tokens that write '긍정뷁'"):
        Request(engine, "base", PROMPT, choice=["날씨가", "긍정뷁"], choice_logprobs=True)


def test_rows_of_different_adapters_share_each_step(
    engine: Engine, base: Path, adapters: dict[str, Path]
) -> None:
    load(engine, base, adapters)
    [core] = {model.core for model in engine._models.values()}
    passes: list[int] = []
    run = core.compute.run

    def counted(pieces: Any) -> Any:
        passes.append(len(pieces))
        return run(pieces)

    core.compute.run = counted  # type: ignore[method-assign]
    with Pause(engine):
        requests = [Request(engine, kind, PROMPT, max_new_tokens=NEW) for kind in KINDS]
    for request in requests:
        assert len(request.wait().ids()) == NEW
    assert len(passes) == NEW
    assert max(passes) == len(KINDS)


def test_a_base_goes_with_its_last_adapter_and_is_counted_once(
    engine: Engine, base: Path, adapters: dict[str, Path]
) -> None:
    load(engine, base, adapters)
    sizes = {said["name"]: said["weight_bytes"] for said in engine.models()}
    core = engine._models["all"].core
    assert core.compute is not None
    whole = core.compute.weight_bytes
    assert all(whole < size < 1.5 * whole for size in sizes.values())
    own = sum(model.adapter_bytes for model in engine._models.values())
    assert engine.budget.declared_bytes == core.reserved_bytes + own
    assert engine.budget.weight_bytes == core.reserved_bytes
    running = Request(engine, "all", PROMPT, max_new_tokens=NEW)
    for kind in [kind for kind in KINDS if kind != "all"]:
        engine.unload(kind)
    assert len(running.wait().ids()) == NEW  # the others' end is none of its own
    assert engine.budget.declared_bytes == core.reserved_bytes + engine._models["all"].adapter_bytes
    engine.unload("all")
    assert (engine.budget.declared_bytes, engine.budget.weight_bytes) == (0, 0)
    assert core.compute is None
    assert not engine._cores.by_name


def test_an_unloaded_adapters_requests_end_and_those_of_others_go_on(
    engine: Engine, base: Path, adapters: dict[str, Path]
) -> None:
    load(engine, base, adapters)
    with Pause(engine):
        ended = Request(engine, "all", PROMPT, max_new_tokens=100)
        others = [Request(engine, kind, PROMPT, max_new_tokens=NEW) for kind in list(KINDS)[1:]]
    engine.unload("all")
    assert isinstance(ended.wait().error, ModelNotFound) or len(ended.ids()) == 100
    for other in others:
        assert len(other.wait().ids()) == NEW
    with pytest.raises(ModelNotFound):
        Request(engine, "all", PROMPT)
    engine.load("all", str(adapters["all"]), base=str(base))
    assert len(Request(engine, "all", PROMPT, max_new_tokens=NEW).wait().ids()) == NEW


def test_prefixes_are_shared_among_the_rows_of_one_adapter_only(
    base: Path, adapters: dict[str, Path], new_engine: NewEngine
) -> None:
    engine = new_engine(memory_mib=64, backend="native", prefix_cache_mib=16)
    load(engine, base, adapters)
    prompt = " ".join(SENTENCES)[:150]
    first = Request(engine, "all", prompt, max_new_tokens=2).wait()
    assert first.sequences[0].cached_tokens == 0
    other = Request(engine, "biases", prompt, max_new_tokens=2).wait()
    assert other.sequences[0].cached_tokens == 0
    again = Request(engine, "all", prompt, max_new_tokens=2).wait()
    assert again.sequences[0].cached_tokens == len(again.prompt) - 1
    assert again.ids() == first.ids()
    with Pause(engine):
        both = [Request(engine, kind, prompt + "밤", max_new_tokens=2) for kind in KINDS]
    for request, kind in zip(both, KINDS, strict=True):
        cached = request.wait().sequences[0].cached_tokens
        assert (cached > 0) is (kind in ("all", "biases"))


def test_a_model_that_is_one_of_an_adapters_base_shares_its_weights(
    engine: Engine, base: Path, adapters: dict[str, Path]
) -> None:
    plain = engine.load("base", str(base))
    tuned = engine.load("all", str(adapters["all"]), base=str(base))
    assert tuned.core is plain.core
    engine.unload("base")
    assert len(Request(engine, "all", PROMPT, max_new_tokens=NEW).wait().ids()) == NEW
    assert engine.load("base", str(base)).core is tuned.core
    with pytest.raises(ModelAlreadyLoaded):
        engine.load("all", str(adapters["biases"]), base=str(base))


def test_a_base_that_is_replaced_is_that_of_what_is_loaded_from_then_on(
    engine: Engine, tmp_path: Path
) -> None:
    base = make_talkative(tmp_path / "base", seed=1)
    old, new = (make_adapter(tmp_path / name, base, seed=4) for name in ("old", "new"))
    engine.load("old", str(old), base=str(base))
    before = Request(engine, "old", PROMPT, max_new_tokens=NEW).wait().ids()
    make_talkative(base, seed=2)
    engine.load("new", str(new), base=str(base))
    with Pause(engine):
        both = [Request(engine, name, PROMPT, max_new_tokens=NEW) for name in ("old", "new")]
    assert both[0].wait().ids() == before != both[1].wait().ids()


# What is merged


def check_merged(base: Path, adapter: Path, changes: dict[str, Any]) -> None:
    """An adapter computes what its base does with these weights; it takes no part in others'
    steps."""
    of_base = Manifests().open(base)
    merged = merge(of_base, Manifests().open_adapter(adapter))
    ids = np.random.default_rng(0).integers(4, 150, 60).tolist()
    model = NativeModel(prepared(merged, "fp32", None))
    found = logits_of(model, ids)
    model.close()
    weights = {**of_base.weights, **changes}
    names = set(merged.weights)
    assert names == set(weights)
    for name in names:
        np.testing.assert_allclose(merged.weights[name], weights[name], rtol=0, atol=2e-6)
    rewritten = dataclasses.replace(of_base, config=merged.config)
    rewritten.weights.clear()
    rewritten.weights.update(weights)
    mx_model = GPT2(merged.config, rewritten.weights)
    wanted = mx_model(mx.nd.array([ids])).asnumpy()[0]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3)


def merged_weights(base: Path, adapter: Path, scale: float = 2.0) -> dict[str, Any]:
    """The matrices of `base` with those of an adapter of `make_adapter` added."""
    weights, found = Manifests().open(base).weights, Manifests().open_adapter(adapter)
    changed = {}
    for module in found.scales:
        layer, product = module.split(".")
        name = f"{BASE_NAMES[product].format(layer)}.weight"
        up, down = (found.weights[f"{module}.{part}"].astype(np.float64) for part in ("up", "down"))
        changed[name] = weights[name] + scale * up @ down
    return changed


def test_doras_magnitudes_are_merged(base: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    magnitudes = {
        f"base_model.model.transformer.h.{layer}.mlp.c_fc.lora_magnitude_vector": rng.uniform(
            0.5, 2, 256
        ).astype(np.float32)
        for layer in range(2)
    }
    adapter = make_adapter(
        tmp_path / "dora", base, modules=["mlp.c_fc"], weights=magnitudes, config={"use_dora": True}
    )
    changes = merged_weights(base, adapter)
    for (name, matrix), magnitude in zip(changes.items(), magnitudes.values(), strict=True):
        norms = np.linalg.norm(matrix, axis=1, keepdims=True)
        changes[name] = matrix * magnitude[:, None] / norms
    check_merged(base, adapter, changes)


def test_parameters_that_an_adapter_brings_take_the_places_of_the_bases(
    base: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(4)

    def numbers(*shape: int) -> Any:
        return rng.standard_normal(shape).astype(np.float32)

    of_base = Manifests().open(base)
    c = of_base.config
    brought = {
        "lm_head.weight": numbers(c.vocab_size, c.units),
        "transformer.ln_f.weight": numbers(c.units),
        "transformer.h.1.ln_2.bias": numbers(c.units),
        "transformer.h.0.mlp.c_proj.weight": numbers(c.hidden_size, c.units),
        "transformer.h.0.attn.c_proj.bias": numbers(c.units),
    }
    tensors = {f"base_model.model.{name}": value for name, value in brought.items()}
    adapter = make_adapter(tmp_path / "a", base, modules=["attn.c_attn"], weights=tensors)
    changes = merged_weights(base, adapter) | {
        OUTPUT: brought["lm_head.weight"],
        "_final_ln.gamma": brought["transformer.ln_f.weight"],
        "_ffn_ln.1.beta": brought["transformer.h.1.ln_2.bias"],
        f"{FFN_OUT.format(0)}.weight": brought["transformer.h.0.mlp.c_proj.weight"].T,
        f"{ATTENTION_OUT.format(0)}.bias": brought["transformer.h.0.attn.c_proj.bias"],
    }
    check_merged(base, adapter, changes)


TOKENS = "base_model.model.transformer.wte.token_adapter.trainable_tokens_delta"


def with_tokens(path: Path, base: Path, ids: list[int] | None, rows: int, units: int = 64) -> Path:
    trained = np.random.default_rng(5).standard_normal((rows, units)).astype(np.float32)
    config = {"trainable_token_indices": ids}
    return make_adapter(
        path, base, modules=["attn.c_attn"], weights={TOKENS: trained}, config=config
    )


def test_rows_that_were_trained_take_the_places_of_the_embeddings(
    base: Path, tmp_path: Path
) -> None:
    adapter = with_tokens(tmp_path / "a", base, [9, 149, 30], 3)
    embedding = np.array(Manifests().open(base).weights[EMBEDDING])
    embedding[[9, 149, 30]] = np.random.default_rng(5).standard_normal((3, 64))
    check_merged(base, adapter, merged_weights(base, adapter) | {EMBEDDING: embedding})
    other = with_tokens(tmp_path / "b", base, [9, 149, 31], 3)  # the same matrices
    first, second = (
        merge(Manifests().open(base), Manifests().open_adapter(path)) for path in (adapter, other)
    )
    assert first.content != second.content


@pytest.mark.parametrize(
    ("ids", "rows", "units", "said"),
    [
        ([9], 2, 64, "the trained rows of _embed.weight are (2, 64), must be (1, 64)"),
        ([9], 1, 63, "the trained rows of _embed.weight are (1, 63), must be (1, 64)"),
        ([100000], 1, 64, "trainable_token_indices has 100000, but the vocabulary has"),
        (None, 1, 64, "adapter_config.json lacks the trainable_token_indices of"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    engine: Engine, base: Path, tmp_path: Path, ids: Any, rows: int, units: int, said: str
) -> None:
    assert said in refused(engine, with_tokens(tmp_path / "a", base, ids, rows, units), base)


def test_an_adapter_may_bring_a_vocabulary_of_its_own(
    tmp_path: Path, new_engine: NewEngine
) -> None:
    base = make_hugging_face(tmp_path / "base", vocab=700)
    other = make_hugging_face(tmp_path / "other", vocab=730, seed=3)
    embedding = np.array(open_artifact(other).weights[EMBEDDING])
    tensors = {
        "base_model.model.transformer.wte.weight": embedding,
        "base_model.model.lm_head.weight": embedding,
    }
    adapter = make_adapter(tmp_path / "a", base, weights=tensors)
    engine = new_engine(memory_mib=64, backend="native", precision="fp32")
    with pytest.raises(ArtifactError, match=r"brings a vocabulary of 730 instead of 700"):
        engine.load("a", str(adapter), base=str(base))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (adapter / name).write_bytes((other / name).read_bytes())
    model = engine.load("a", str(adapter), base=str(base))
    assert (model.config.vocab_size, model.adapter) == (730, None)
    assert model.describe()["base"] == str(base)
    assert len(Request(engine, "a", PROMPT, max_new_tokens=4).wait().ids()) > 0
    engine.load("base", str(base))
    assert engine._models["base"].core is not model.core


def test_a_merged_adapter_answers_and_goes_like_any_model(
    engine: Engine, base: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    bias = {"base_model.model.transformer.h.0.ln_1.bias": np.full(64, 0.5, np.float32)}
    path = make_adapter(tmp_path / "a", base, weights=bias)
    engine.load("all", str(adapters["all"]), base=str(base))
    with Pause(engine):
        engine.load("merged", str(path), base=str(base))
        both = [Request(engine, name, PROMPT, max_new_tokens=NEW) for name in ("all", "merged")]
    assert both[0].wait().ids() != both[1].wait().ids()
    for name in ("all", "merged"):
        engine.unload(name)
    assert (engine.budget.declared_bytes, engine.budget.weight_bytes) == (0, 0)


# Bad input


def refused(engine: Engine, path: Path, base: Path) -> str:
    before = engine.budget.declared_bytes
    with pytest.raises((ArtifactError, InvalidRequest)) as caught:
        engine.load("bad", str(path), base=str(base))
    assert engine.budget.declared_bytes == before
    assert "bad" not in engine._models
    return caught.value.message


BAD_CONFIGS = {
    "peft_type is 'IA3'": {"peft_type": "IA3"},
    "peft_type is None": {"peft_type": None},
    "'PROMPT_TUNING'": {"peft_type": "PROMPT_TUNING"},
    "task_type is 'SEQ_CLS'": {"task_type": "SEQ_CLS"},
    "must be token ids, or token ids of wte and lm_head, is {'c_attn'": {
        "trainable_token_indices": {"c_attn": [1]}
    },
    "must be token ids, or token ids of wte and lm_head, is [-1]": {
        "trainable_token_indices": [-1]
    },
    "arrow_config": {"arrow_config": {"top_k": 1}},
    "'pissa_niter_4'": {"init_lora_weights": "pissa_niter_4"},
    "rank 9": {"r": 9},
    "rank 3": {"rank_pattern": {"c_attn": 3}},
    "lora_alpha is 'viel'": {"lora_alpha": "viel"},
    "alpha_pattern has the key '(('": {"alpha_pattern": {"((": 3}},
    "rank_pattern must be": {"rank_pattern": [1]},
}


@pytest.mark.parametrize("message", BAD_CONFIGS)
def test_what_an_adapter_cannot_be_is_refused_with_the_reason(
    base: Path, tmp_path: Path, message: str
) -> None:
    path = make_adapter(tmp_path / "나쁜", base, config=BAD_CONFIGS[message])
    with pytest.raises(ArtifactError) as caught:
        Manifests().open_adapter(path)
    assert message in caught.value.message


def lora(name: str, shape: tuple[int, ...], value: float = 0.5) -> dict[str, Any]:
    return {f"base_model.model.transformer.h.{name}": np.full(shape, value, np.float32)}


BAD_WEIGHTS: dict[str, dict[str, Any]] = {
    "layer 2, but its base has 2 layers": {
        **lora("2.attn.c_attn.lora_A.weight", (4, 64)),
        **lora("2.attn.c_attn.lora_B.weight", (192, 4)),
    },
    "down of qkv in layer 0 is (4, 65), must be (4, 64)": lora(
        "0.attn.c_attn.lora_A.weight", (4, 65)
    ),
    "up of ffn_out in layer 1 is (63, 4)": lora("1.mlp.c_proj.lora_B.weight", (63, 4)),
    "of different ranks": lora("0.attn.c_attn.lora_A.weight", (5, 64)),
    "lacks lora_B of h.3.attn.c_attn": lora("3.attn.c_attn.lora_A.weight", (4, 64)),
    "_embed.weight is (5, 63), must be (5, 64)": {
        "base_model.model.transformer.wte.weight": np.zeros((5, 63), np.float32)
    },
    "of different sizes": {
        "base_model.model.transformer.wte.weight": np.zeros((5, 64), np.float32)
    },
    "_attn_ln.0.beta is (63,), must be (64,)": lora("0.ln_1.bias", (63,)),
    "holds base_model.model.transformer.ln_x.weight": {
        "base_model.model.transformer.ln_x.weight": np.zeros((64,), np.float32)
    },
    "c_attn.lora_velora_embed, which is no LoRA": lora("0.attn.c_attn.lora_velora_embed", (1,)),
    "holds NaN or infinity": lora("0.attn.c_attn.lora_A.weight", (4, 64), np.nan),
    "has the shape (4,)": lora("0.attn.c_attn.lora_A.weight", (4,)),
    "is int32": {
        "base_model.model.transformer.h.0.attn.c_attn.lora_A.weight": np.ones((4, 64), np.int32)
    },
}


@pytest.mark.parametrize("message", BAD_WEIGHTS)
def test_matrices_that_do_not_fit_are_refused_and_nobody_else_notices(
    base: Path, adapters: dict[str, Path], tmp_path: Path, message: str, new_engine: NewEngine
) -> None:
    engine = new_engine(memory_mib=64, backend="native")
    engine.load("good", str(adapters["all"]), base=str(base))
    path = make_adapter(tmp_path / "나쁜", base, weights=BAD_WEIGHTS[message])
    assert message in refused(engine, path, base)
    assert len(Request(engine, "good", PROMPT, max_new_tokens=NEW).wait().ids()) == NEW


def test_more_that_is_no_adapter_of_a_base(engine: Engine, base: Path, tmp_path: Path) -> None:
    huge = make_adapter(tmp_path / "rank", base, rank=100)
    assert "rank 100 in layer 0, more than the 64 units" in refused(engine, huge, base)
    large = make_adapter(tmp_path / "large", base, modules=["attn.c_attn"], scale=1e30)
    if engine.settings.precision != "fp32":
        assert "too large for fp16" in refused(engine, large, base)
    empty = make_adapter(tmp_path / "empty", base, modules=[])
    assert "no matrices" in refused(engine, empty, base)
    (empty / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors" in refused(engine, empty, base)
    (empty / "adapter_config.json").write_text("{", encoding="utf-8")
    assert "adapter_config.json" in refused(engine, empty, base)
    good = make_adapter(tmp_path / "good", base)
    assert "adapter" in refused(engine, good, good)  # a base that is an adapter itself
    assert "no model folder" in refused(engine, good, tmp_path / "nowhere")


def test_a_scale_has_rank_alpha_patterns_and_rslora(base: Path, tmp_path: Path) -> None:
    path = make_adapter(
        tmp_path / "patterns",
        base,
        rank=4,
        config={
            "lora_alpha": 6,
            "use_rslora": True,
            "alpha_pattern": {"c_attn": 10, "h.1.mlp.c_fc": 3, "^transformer.h.0.mlp.c_fc": 5},
        },
    )
    scales = Manifests().open_adapter(path).scales
    assert scales["0.qkv"] == scales["1.qkv"] == 5
    assert scales["1.ffn_hidden"] == 1.5
    assert scales["0.ffn_hidden"] == 2.5
    assert scales["0.ffn_out"] == scales["1.attention_out"] == 3


def test_patterns_see_the_names_that_peft_saw(base: Path, tmp_path: Path) -> None:
    """Without `transformer.` where an adapter was trained on that part of a model alone."""
    path = make_adapter(
        tmp_path / "part",
        base,
        modules=[],
        config={
            "alpha_pattern": {"transformer.h.1.mlp.c_fc": 90, r"^h\.1\.mlp": 80, "^h.1.mlp.*": 3}
        },
        weights={
            "base_model.model.h.1.mlp.c_fc.lora_A.weight": np.ones((4, 64), np.float32),
            "base_model.model.h.1.mlp.c_fc.lora_B.weight": np.ones((256, 4), np.float32),
        },
    )
    assert Manifests().open_adapter(path).scales == {"1.ffn_hidden": 0.75}


def test_an_adapter_that_changes_is_read_again(base: Path, tmp_path: Path) -> None:
    path = make_adapter(tmp_path / "a", base, seed=1)
    manifests = Manifests()
    first = manifests.open_adapter(path)
    assert manifests.open_adapter(path).content == first.content
    assert Manifests().open_adapter(path) == first  # from its manifest
    make_adapter(path, base, seed=2)
    assert manifests.open_adapter(path).content != first.content
    [file] = (path / ".prepared").glob("*.source.json")
    assert json.loads(file.read_text())["artifact"]["base"] == open_artifact(base).path.name
