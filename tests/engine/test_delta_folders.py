"""Folders with a delta in place of weights: served beside their base, and refused without it."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from common.errors import ArtifactError, EngineError
from common.memory import MIB
from common.model_files import visible
from engine.artifacts.files import read_json
from engine.artifacts.read_safetensors import read_safetensors
from engine.engine import Engine
from engine.native import prepared
from engine.native.delta_folder import read_folder
from scripts.artifacts import conversion
from tests.engine.adapters import make_adapter
from tests.engine.conftest import NewEngine
from tests.engine.deltas import change_metadata, fine_tuned
from tests.engine.engines import Pause, Request, make_talkative, settle
from tests.engine.models import params_of, write_params

PROMPT = "오늘은 날씨가"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_talkative(tmp_path_factory.mktemp("base") / "바탕", seed=7)


@pytest.fixture(scope="module")
def whole(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fine_tuned(tmp_path_factory.mktemp("whole") / "시", base)


@pytest.fixture(scope="module")
def made(base: Path, whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("delta") / "시의 델타"
    folder.mkdir()
    artifacts = map(conversion.open_source, (whole, base))
    conversion.to_delta(*artifacts, folder, tmp_path_factory.mktemp("cache"))
    return folder


@pytest.fixture
def delta(made: Path, tmp_path: Path) -> Path:
    """A copy of its own."""
    return shutil.copytree(made, tmp_path / "시의 델타")


@pytest.fixture
def engine(new_engine: NewEngine) -> Engine:
    return new_engine(memory_mib=64, backend="native")


def ask(engine: Engine, name: str) -> list[int]:
    return Request(engine, name, PROMPT, max_new_tokens=16).wait().ids()


def test_it_answers_as_the_fine_tune_that_it_was_made_of(
    engine: Engine, base: Path, whole: Path, made: Path
) -> None:
    models = [engine.load(f.name, str(f), base=str(base)) for f in (whole, made)]
    engine.load("바탕", str(base))
    assert models[0].core is models[1].core
    assert models[1].describe()["base"] == str(base)
    assert ask(engine, "시의 델타") == ask(engine, "시") != ask(engine, "바탕")


def test_it_has_the_tokenizer_and_settings_of_the_fine_tune_and_no_weights(
    made: Path, whole: Path
) -> None:
    names = [path.name for path in visible(made)]
    assert names == ["config.json", "delta.safetensors", "kogpt2.spiece"]
    assert read_json(made / "config.json") == {
        **read_json(whole / "config.json"),
        "_name_or_path": "바탕",
    }


def test_its_bytes_are_counted_and_returned(engine: Engine, base: Path, made: Path) -> None:
    engine.load("바탕", str(base))
    before, size = engine.budget.weight_bytes, (made / "delta.safetensors").stat().st_size
    for _ in range(20):
        model = engine.load("시", str(made), base=str(base))
        assert abs(model.own_bytes - size) <= 4096
        assert model.held()["reserved_bytes"] > model.own_bytes
        assert ask(engine, "시")
        engine.unload("시")
    assert engine.budget.weight_bytes == before


@pytest.mark.slow
def test_300_loads_and_unloads_leave_memory_and_disk_where_they_were(
    new_engine: NewEngine, base: Path, whole: Path, made: Path, tmp_path: Path
) -> None:
    engine = new_engine(memory_mib=64, backend="native", cache_dir=str(tmp_path / "cache"))
    process = psutil.Process()

    def load_and_unload(times: int) -> None:
        for i in range(times):
            folder = (whole, made)[i % 2]
            engine.load(f"시 {i}", str(folder), base=str(base))
            assert ask(engine, f"시 {i}")
            engine.unload(f"시 {i}")

    def used() -> tuple[int, ...]:
        gc.collect()
        settle(engine)
        files = sum(path.is_file() for path in (tmp_path / "cache").iterdir())
        maps = Path("/proc/self/maps").read_text("utf-8").count(str(tmp_path))
        budget = engine.budget.weight_bytes + engine.budget.kv_bytes + engine.budget.declared_bytes
        return process.num_fds(), files, maps, budget

    load_and_unload(50)
    before, size = used(), process.memory_info().rss
    load_and_unload(300)
    assert used() == before
    assert process.memory_info().rss - size < 8 * MIB


def test_a_file_that_is_overwritten_harms_no_loaded_model(
    engine: Engine, base: Path, delta: Path
) -> None:
    """As `cp` writes: the file is cut off and filled again, which must end no process."""
    engine.load("시", str(delta), base=str(base))
    before = ask(engine, "시")
    (delta / "delta.safetensors").write_bytes(b"")
    assert ask(engine, "시") == before
    with pytest.raises(ArtifactError, match=r"delta\.safetensors is not a safetensors file"):
        engine.load("다시", str(delta), base=str(base))


# Refusals


def refused(engine: Engine, folder: Path, base: Path | None, **options: Any) -> str:
    before = engine.budget.weight_bytes
    with pytest.raises(EngineError) as error:
        engine.load("시", str(folder), base=None if base is None else str(base), **options)
    assert error.value.status == 400
    assert engine.budget.weight_bytes == before
    return error.value.message


def test_it_needs_its_base_in_int8_on_a_cpu(
    engine: Engine, base: Path, made: Path, tmp_path: Path
) -> None:
    assert "serve it beside its base" in refused(engine, made, None)
    assert "its base: there is no such model folder" in refused(engine, made, tmp_path / "없음")
    assert "its base: the folder holds a delta" in refused(engine, made, made)
    message = refused(engine, made, base, precision="fp32")
    assert message.startswith("a delta needs int8 on a CPU: its precision is fp32")


def test_another_base_of_the_same_shape_is_refused(
    engine: Engine, base: Path, made: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(base, tmp_path / "다른 바탕")
    weights = params_of(other)
    weights["_pos_embed.weight"][3, 5] += 0.25
    write_params(other / "kogpt2.params", weights)
    message = refused(engine, made, other)
    assert "was not made with this base, or that has other weights by now" in message
    assert "convert FINE-TUNE FOLDER --to delta --base BASE" in message


def test_a_base_that_computes_otherwise_is_refused(
    engine: Engine, base: Path, made: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(base, tmp_path / "다른 머리")
    config = {**read_json(other / "config.json"), "num_heads": 1}
    (other / "config.json").write_text(json.dumps(config), "utf-8")
    assert "its num_heads is" in refused(engine, made, other)


CONFIG = {
    "vocab_size": 200, "units": 64, "num_layers": 2, "num_heads": 2, "hidden_size": 256,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "1 on 3"}, "has the format 1 on 3 instead of"),
        ({"format": None}, "has the format None instead of"),
        ({"source": 5}, "lacks some of its metadata"),
        ({"config": "{}"}, "no configuration of a GPT-2"),
        ({"config": "[" * 100_000}, "config"),
        ({"config": json.dumps({**CONFIG, "units": -1})}, "no configuration of a GPT-2"),
        ({"config": json.dumps({**CONFIG, "num_layers": 10**12})}, "for 1000000000000 layers"),
        ({"config": json.dumps({**CONFIG, "vocab_size": 1 << 62})}, "is not as its configuration"),
        ({"config": json.dumps({**CONFIG, "num_layers": 1})}, "ranks and bits of other matrices"),
        ({"choices": "{}"}, "ranks and bits of other matrices"),
        ({"choices": '{"0.qkv": [8, 9]}'}, "has rank 8 and 9 bits"),
        ({"choices": "[]"}, "ranks and bits are damaged"),
        ({"choices": '{"0.qkv": [8, 1e999]}'}, "ranks and bits are damaged"),
        ({"blake3": "0" * 64}, "is damaged"),
        ({"more": "-1"}, "has -1 more tokens than its base"),
        ({"more": "9" * 5000}, "more tokens than its base"),
        ({"more": "1000000"}, "has 1000000 more tokens than its base"),
        ({"more": "1"}, "is not as its configuration"),
        ({"source": "가 나"}, "was not made with this base"),
        ({"source": ""}, "was not made with this base"),
    ],
)
def test_metadata_of_anything_else_are_refused(
    engine: Engine, base: Path, delta: Path, changes: dict[str, Any], message: str
) -> None:
    change_metadata(delta / "delta.safetensors", **changes)
    assert message in refused(engine, delta, base)
    assert refused(engine, delta, base)  # again, from what is known by then


def write_numbers(name: str, number: bytes = b"\xff" * 4) -> Callable[[Path], None]:
    """Writes NaN, or another number, where a tensor ends, which is where a rest has its scales."""

    def damage(file: Path) -> None:
        index, _, begin = read_safetensors(file)
        tensor, data = index[name], bytearray(file.read_bytes())
        end = tensor.offset + tensor.nbytes
        data[end - 4 : end] = number
        file.write_bytes(data)
        digest = prepared.digest(np.frombuffer(data, np.uint8)[begin:])
        change_metadata(file, blake3=digest)

    return damage


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        *(
            (write_numbers(name), f"{name} holds NaN or infinity")
            for name in ("1.qkv.rest", "embedding.rest", "0.ffn_out.up", "final_norm.beta")
        ),
        (lambda file: file.write_bytes(file.read_bytes()[:-100]), "delta.safetensors"),
        (lambda file: file.write_bytes(b"\xff" * 100), "is not a safetensors file"),
        (lambda file: (file.parent / "kogpt2.spiece").unlink(), "no *.spiece files"),
    ],
)
def test_damaged_files_are_refused(
    engine: Engine, base: Path, delta: Path, damage: Callable[[Path], Any], message: str
) -> None:
    damage(delta / "delta.safetensors")
    assert message in refused(engine, delta, base)


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"do_sample": True, "seed": 1, "logprobs": 3},
        {"choice": ["오늘", "날씨"]},
        {"logprobs": 1, "decoder_input_details": True},
        {"regex": "(오늘|날씨)+"},
    ],
)
def test_numbers_that_overflow_fail_their_own_requests(
    engine: Engine, base: Path, whole: Path, delta: Path, options: dict[str, Any]
) -> None:
    huge = np.float32(3e38).tobytes()
    write_numbers("final_norm.gamma", huge)(delta / "delta.safetensors")
    for folder in (whole, delta):
        engine.load(folder.name, str(folder), base=str(base))
    alone = ask(engine, "시")
    with Pause(engine):
        good = Request(engine, "시", PROMPT, max_new_tokens=16)
        bad = Request(engine, "시의 델타", PROMPT, max_new_tokens=16, **options)
    assert good.wait().ids() == alone
    error = bad.wait().error
    assert error is not None
    assert (error.status, "its weights are damaged" in error.message) == (400, True)


def test_the_file_of_another_version_says_what_to_do(delta: Path) -> None:
    change_metadata(delta / "delta.safetensors", format="0 on 0")
    with pytest.raises(ArtifactError, match=r"make it again: \./kogpt2 convert"):
        read_folder(delta)


def test_a_folder_with_an_adapter_and_a_delta_is_refused(
    engine: Engine, base: Path, delta: Path
) -> None:
    make_adapter(delta, base)
    with pytest.raises(ArtifactError, match=r"adapter_config.json and delta.safetensors: one"):
        engine.load("둘", str(delta), base=str(base))
