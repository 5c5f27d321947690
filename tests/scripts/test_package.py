"""kogpt2 package: what the server would refuse is refused; the rest is packed, always the same."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from command.errors import Problem
from engine.artifacts.artifact import FFN_HIDDEN, FFN_OUT
from engine.artifacts.open import open_artifact
from scripts.artifacts.archive import check, write_archive
from testbed import random_model
from tests.engine.deltas import fine_tuned
from tests.engine.hugging_face import make_hugging_face, write_json
from tests.engine.models import make_artifact, params_of, write_params
from tests.handlers.tensors.graphs import TinyLM, classifier
from tests.scripts import command
from tests.scripts.command import output, refusal
from tests.serving.store.archives import unpack

run = partial(command.run, "package")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "시 모음")


@pytest.fixture
def packed(folder: Path) -> Path:
    return folder.with_name("시 모음.tar.gz")


def test_a_folder_becomes_an_archive_that_the_server_unpacks(folder: Path, packed: Path) -> None:
    done = run(folder, "--check")
    assert (done.returncode, list(folder.parent.iterdir())) == (0, [folder])  # it writes nothing
    assert "2 layers, 64 units, 2 heads" in output(run(folder))
    unpacked = folder.with_name("unpacked")
    unpack(packed, unpacked)
    contents = [{p.name: p.read_bytes() for p in each.iterdir()} for each in (folder, unpacked)]
    assert contents[0] == contents[1]
    open_artifact(unpacked)


def test_a_file_with_almost_the_right_name_is_reported(folder: Path) -> None:
    (folder / "config.json").rename(folder / "Config.json")
    done = run(folder, "--check")
    assert "'Config.json' is not read: config.json is the name" in done.stderr


@pytest.mark.parametrize("make", [make_artifact, make_hugging_face])
def test_the_same_files_give_the_same_bytes(
    make: Callable[[Path], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    for name, now in (("one", 1e9), ("two", 2e9)):
        monkeypatch.setattr(time, "time", lambda now=now: now)  # gzip would write it
        folder = make(tmp_path / name / "model")
        (folder / "extra").mkdir()
        (folder / "extra" / "읽어 보기.txt").write_text("가", encoding="utf-8")
        written: list[int] = []
        write_archive(checked := check(folder), tmp_path / f"{name}.tar.gz", written.append)
        assert sum(written) == checked.num_bytes  # what the progress bar shows
        made.append((tmp_path / f"{name}.tar.gz").read_bytes())
        os.utime(folder / "config.json", (1, 1))
    assert made[0] == made[1]


def test_a_classifier_is_named_with_its_labels(tmp_path: Path) -> None:
    checked = check(make_hugging_face(tmp_path / "감정", labels=["부정", "긍정"]))
    assert checked.summary.endswith("; a classifier of texts with 2 labels: 부정, 긍정")
    assert checked.in_int8 is None  # whose texts would be compared


def test_leftovers_of_tools_are_left_out_and_prepared_models_are_packed(folder: Path) -> None:
    for name in (
        *(".git/file", "__pycache__/file", ".DS_Store", "optimizer.pt", "rng_state_0.pth"),
        *("scheduler.pt", "trainer_state.json", "training_args.bin", ".prepared/file"),
        *(".prepared/봄.safetensors", ".prepared/봄.source.json"),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("x")
    names = {path.name for path in check(folder).files}
    assert names == {"config.json", "kogpt2.params", "kogpt2.spiece", "봄.safetensors"}


def weights_of_nan(folder: Path) -> None:
    tensor = open_artifact(folder).index["_final_ln.beta"]
    with (folder / tensor.file).open("r+b") as file:
        file.seek(tensor.offset)
        file.write(b"\xff" * 4)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (weights_of_nan, "kogpt2.params: _final_ln.beta holds NaN or infinity"),
        (lambda f: (f / "kogpt2.spiece").unlink(), "no *.spiece files"),
        (lambda f: write_json(f / "generation.json", {"온도": 1}), "온도 is not known"),
        (lambda f: (f / "kogpt2.spiece").write_bytes(b"x"), "is not a sentencepiece model"),
        (lambda f: os.mkfifo(f / "pipe"), "pipe is not a regular file"),
        (lambda f: (f / "broken").symlink_to("nowhere"), "broken cannot be read"),
        (shutil.rmtree, "does not exist"),
    ],
)
def test_what_would_not_be_served_is_refused_with_the_reason(
    folder: Path, packed: Path, damage: Callable[[Path], Any], message: str
) -> None:
    damage(folder)
    assert message in refusal(run(folder), 2)
    assert not packed.exists()


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("a.tar.gz", "exists"),
        ("a.zip", r"must be called NAME\.tar\.gz"),
        ("없는 곳/a.tar.gz", "cannot write"),
    ],
)
def test_nothing_is_overwritten_and_nothing_half_written_stays(
    folder: Path, target: str, message: str
) -> None:
    (folder.parent / "a.tar.gz").write_bytes(b"mine")
    with pytest.raises(Problem, match=message):
        write_archive(check(folder), folder.parent / target)
    assert {p.name for p in folder.parent.iterdir()} == {"a.tar.gz", folder.name}
    assert (folder.parent / "a.tar.gz").read_bytes() == b"mine"


def test_an_archive_is_checked_and_packed_as_its_folder_is(folder: Path, packed: Path) -> None:
    again = folder.with_name("again.tar.gz")
    output(run(folder))
    assert "2 layers" in output(run(packed, "--check"))
    assert "give --out" in refusal(run(packed), 2)
    assert "cannot write" in refusal(run(folder, "--out", folder.parent / "없음" / "a.tar.gz"), 2)
    output(run(packed, "--out", again))
    assert again.read_bytes() == packed.read_bytes()
    packed.write_bytes(b"no archive")
    assert "cannot be unpacked" in refusal(run(packed, "--check"), 2)
    assert "does not exist" in refusal(run(folder / "없음.tar.gz", "--check"), 2)


def test_the_tensors_of_a_graph_or_symbol_are_shown(tmp_path: Path) -> None:
    TinyLM().save(tmp_path / "gpt2" / "1" / "model.onnx")
    assert check(tmp_path / "gpt2").summary == (
        "onnxruntime_onnx, input_ids INT64 [-1, -1], attention_mask INT64 [-1, -1]"
        " -> logits FP32 [-1, -1, 40]"
    )
    classifier(tmp_path / "images")
    assert check(tmp_path / "images").summary == (
        "mxnet_symbol, data FP32 [-1, 3, 16, 16] -> softmax_output FP32 [-1, 5]"
    )
    (tmp_path / "model.onnx").write_bytes(b"no graph")
    with pytest.raises(Problem, match=r"cannot be served: model.onnx cannot be loaded"):
        check(tmp_path)


# What int8 changes


def harm_int8(folder: Path) -> Path:
    """Give a hidden unit of each layer, which is always 0, weights 2,000 times as large as any."""
    weights = params_of(folder)
    for layer in range(2):
        weights[f"{FFN_HIDDEN.format(layer)}.weight"][3] = 0
        weights[f"{FFN_HIDDEN.format(layer)}.bias"][3] = -20  # GELU makes it 0
        out = weights[f"{FFN_OUT.format(layer)}.weight"]
        out[:, 3] = 2000 * np.abs(out).max() * np.random.default_rng(0).standard_normal(len(out))
    write_params(folder / "kogpt2.params", weights)
    return folder


def test_a_demo_model_in_int8_is_compared_without_a_warning(tmp_path: Path) -> None:
    model = random_model.demo("sowol", tmp_path)
    lines = tmp_path / "시.txt"
    lines.write_text(
        "나 보기가 역겨워 가실 때에는\n\n말없이 고이 보내 드리우리다\n", encoding="utf-8"
    )
    counts = []
    for options in ((), ("--text", lines)):
        done = run(model, "--check", *options)
        assert "int8 against fp32: KL" in output(done)
        assert not done.stderr
        counts.append(re.findall(r"of (\d+)", done.stdout))
    assert counts[0] == ["240", "12"]  # its own greedy texts
    assert counts[1][1] == "2"  # lines
    assert not (model / ".prepared").exists()


def test_a_model_that_int8_harms_gets_a_warning_until_it_is_served_in_fp32(
    folder: Path, packed: Path
) -> None:
    done = run(harm_int8(folder))
    assert "int8 against fp32" in output(done)
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"{folder}: int8 changes")
    assert '"precision": "fp32"' in done.stderr
    packed.unlink()
    done = run(folder, "--no-compare")
    assert ("int8 against" in output(done), done.stderr) == (False, "")
    write_json(folder / "serving.json", {"precision": "fp32"})
    done = run(folder, "--check")
    assert ("int8 against" in output(done), done.stderr) == (False, "")


def test_a_fine_tune_is_packed_as_a_delta_of_its_base(tmp_path: Path) -> None:
    base = make_artifact(tmp_path / "바탕", seed=7)
    whole = fine_tuned(tmp_path / "시", base)
    done = output(run(whole, "--base", base))
    assert "delta " in done
    assert "a delta of 바탕: " in done
    unpack(tmp_path / "시.tar.gz", tmp_path / "unpacked")
    names = {path.name for path in (tmp_path / "unpacked").iterdir()}
    assert names == {"config.json", "delta.safetensors", "kogpt2.spiece"}
    assert "a delta of 바탕: " in output(run(tmp_path / "시.tar.gz", "--check"))
    other = make_artifact(tmp_path / "남", seed=99)
    assert "cannot be a delta" in refusal(run(other, "--base", base), 2)
    assert not (tmp_path / "남.tar.gz").exists()


def test_a_classifier_is_packed_as_a_delta_of_its_base(tmp_path: Path) -> None:
    """Its head and labels are in the archive; there are no texts to compare."""
    base = make_hugging_face(tmp_path / "바탕", units=128)
    labels = ["부정", "긍정"]
    whole = make_hugging_face(tmp_path / "감정", units=128, labels=labels)  # the same weights
    done = output(run(whole, "--base", base))
    assert re.search("a delta of 바탕: .*; a classifier of texts with 2 labels: 부정, 긍정", done)
    assert "delta against" not in done
    unpack(tmp_path / "감정.tar.gz", tmp_path / "unpacked")
    names = {path.name for path in (tmp_path / "unpacked").iterdir()}
    assert names == {
        "config.json", "delta.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    options = (tmp_path / "unpacked", tmp_path / "다시", "--to", "whole", "--base", base)
    refused = command.run("convert", *options)
    assert "is a classifier, which is served beside its base only" in refusal(refused, 2)


def test_lines_to_compare_are_read_before_anything_else(folder: Path) -> None:
    lines = folder.with_name("문장.txt")
    lines.write_text("나는 오늘\n", encoding="cp949")
    assert "문장.txt is not UTF-8" in refusal(run(folder, "--text", lines), 2)


def test_settings_that_the_server_refuses_are_refused(folder: Path) -> None:
    write_json(folder / "serving.json", {"precision": "int4"})
    assert "serving.json: precision" in refusal(run(folder, "--check"), 2)
