"""The estimate of a model's memory on an instance is what the engine counts when it loads it."""

from __future__ import annotations

import tarfile
from contextlib import closing
from pathlib import Path

import pytest

from engine.artifacts.config import KOGPT2
from engine.backends import row_bytes, weight_bytes
from engine.engine import Engine
from engine.settings import Settings
from scripts.artifacts.archive import check, write_archive
from scripts.aws.account import Account
from scripts.aws.instances import MIB, Instance, typical
from scripts.aws.locations import Location, artifacts
from scripts.aws.memory import Needs, all_needs, first_files, of_model
from tests.engine.adapters import make_adapter
from tests.engine.hugging_face import make_hugging_face
from tests.scripts.aws.cloud import BUCKET, Cloud
from tests.serving.store.s3 import archive

ROOT = Path(__file__).resolve().parents[3]
PREFIX = Location(BUCKET, "kogpt2/")
KOGPT2_SIZES = (
    '{"vocab_size": 50000, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024}'
)


def engine(precision: str) -> closing[Engine]:
    return closing(Engine(Settings(backend="native", precision=precision, memory_mib=512)))


def counted(running: Engine, name: str, folder: Path, **options: str) -> Needs:
    """Return the bytes that loading a model adds to the engine's budget."""
    before = running.budget.declared_bytes
    running.load(name, str(folder), **options)
    (model,) = (m for m in running.statistics()["models"] if m["name"] == name)
    return Needs(running.budget.declared_bytes - before, model["row_bytes"])


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_models_in_s3_take_what_the_engine_counts_whatever_their_files_hold(
    aws: Cloud, account: Account, tmp_path: Path, precision: str
) -> None:
    base = make_hugging_face(tmp_path / "봄", units=128, vocab=2000)
    half = make_hugging_face(tmp_path / "half", units=128, vocab=2000, dtype="float16")
    adapter = make_adapter(tmp_path / "lora", base)
    with engine(precision) as running:
        expected = {
            "봄": counted(running, "봄", base),
            "half": counted(running, "half", half),
            "lora": counted(running, "lora", adapter, base=str(base)),
        }
    assert expected["봄"] == expected["half"]
    assert expected["lora"].weights < expected["봄"].weights / 9
    aws.put_models()
    for name in expected:
        packed = tmp_path / f"{name}.tar.gz"
        write_archive(check(tmp_path / name), packed)
        aws.client("s3").upload_file(str(packed), BUCKET, f"{PREFIX.key}{name}.tar.gz")
    stored = artifacts(account, PREFIX)
    needs = all_needs(account, PREFIX, stored, precision)
    found = {one.name: of_one for one, of_one in zip(stored, needs, strict=True)}
    assert found["봄.tar.gz"] == found["half.tar.gz"] == expected["봄"]
    assert found["lora.tar.gz"].weights == expected["lora"].weights


@pytest.mark.parametrize("precision", ["int8", "fp32"])
def test_the_demo_models_take_what_the_engine_counts(tmp_path: Path, precision: str) -> None:
    packed = ROOT / "model_store" / "sowol.tar.gz"
    with tarfile.open(packed) as tar:
        tar.extractall(tmp_path, filter="data")
    with engine(precision) as running:
        expected = counted(running, "소월", tmp_path)
    assert of_model(first_files(packed.read_bytes()[:4096]), 1, precision) == expected


def test_what_says_no_sizes_is_taken_for_kogpt2_or_by_its_archive() -> None:
    kogpt2 = Needs(weight_bytes(KOGPT2, "int8", "cpu"), row_bytes(KOGPT2, "int8"))
    assert kogpt2.weights == pytest.approx(122 * MIB, rel=0.01)
    for files in (
        {"config.json": KOGPT2_SIZES.encode(), "model.safetensors": b""},
        {"kogpt2.params": b"", "kogpt2.spiece": b""},
        {"config.json": b'{"num_heads": 12}', "kogpt2.params": b""},
        {"adapter_config.json": b"{}", "adapter_model.safetensors": b""},
    ):
        assert of_model(first_files(archive(files)), 7, "int8") == kogpt2
    for files in ({"model.onnx": b"1"}, {"code/inference.py": b""}, {"config.json": b"[1]"}):
        assert of_model(first_files(archive(files)), 100, "int8") == Needs(110, 0)
    assert first_files(b"no archive") == {}


def test_the_largest_count_and_the_longest_row() -> None:
    models = [Needs(300, 5), Needs(100, 9), Needs(200, 7)]
    assert typical(models, 2) == Needs(250, 7)
    assert typical(models, 9) == Needs(200, 9)


@pytest.mark.parametrize(
    ("precision", "changed", "models"),
    [
        ("int8", {}, 47),
        ("fp32", {}, 10),
        ("int8", {"max_rows": 1}, 50),
        ("int8", {"memory_mib": 2048}, 14),
    ],
)
def test_an_instance_of_8_gib_holds(precision: str, changed: dict[str, int], models: int) -> None:
    settings = Settings(precision=precision, **changed)  # type: ignore[arg-type]
    model = Needs(weight_bytes(KOGPT2, precision, "cpu"), row_bytes(KOGPT2, precision))
    assert Instance("ml.m5.large", 2, 8).holds(model, settings) == models


def test_processes_limit_how_many_adapters_an_instance_holds() -> None:
    adapter = Needs(3 * MIB, row_bytes(KOGPT2, "int8"))
    # (4,096 MiB - 640 for the server - 16 rows of 19) / (3 + 20 for its place and tokenizer)
    assert Instance("ml.c5.large", 2, 4).holds(adapter, Settings()) == 136
