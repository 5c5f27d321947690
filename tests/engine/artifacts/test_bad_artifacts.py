"""Artifacts that crashed, froze or puzzled a reader: each is refused, and told what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from common.errors import MAX_MESSAGE, ArtifactError
from engine import backends
from engine.artifacts import read_torch as torch_file
from engine.artifacts.open import open_artifact
from engine.artifacts.read_torch import index_torch
from engine.backends.interface import Piece
from tests.engine.artifacts.reading import read_torch
from tests.engine.artifacts.torch_files import Saved, state_dict, write
from tests.engine.hugging_face import make_hugging_face
from tests.engine.models import make_artifact


@pytest.fixture
def v1(tmp_path: Path) -> Path:
    return make_artifact(tmp_path / "v1", max_length=32)


@pytest.fixture
def v2(tmp_path: Path) -> Path:
    return make_hugging_face(tmp_path / "v2")


def refused(folder: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        open_artifact(folder)
    message = caught.value.message
    message.encode("utf-8")
    assert len(message) <= MAX_MESSAGE
    return message


def say(folder: Path, file: str, text: str, **more: Any) -> Path:
    """`text` is put into the file as it is."""
    said = json.loads((folder / file).read_text(encoding="utf-8")) if not more else {}
    body = json.dumps({**said, **more})[:-1] + (", " if said or more else "") + text + "}"
    (folder / file).write_text(body, encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        (Saved([1] * 200, [1] * 200), "200 dimensions"),
        (Saved([1] * 200, [0] * 200), "200 dimensions"),
        (Saved([1 << 40, 1 << 40], [0, 0]), "no possible shape"),
        (Saved([1 << 20, 16], [0, 1], count=16), "more numbers than the file"),
        (Saved([2], [1 << 62]), "no sense"),
        (Saved([1], [1], offset=1 << 62), "no sense"),
        (Saved([0], [1], offset=-1), "no sense"),
        (Saved([-1], [1]), "no sense"),
        (Saved([1 << 62, 0], [1, 1]), "no possible shape"),
        (Saved([1], [1], count=1 << 62), "cut short"),
    ],
)
def test_a_tensor_of_an_impossible_shape(tmp_path: Path, saved: Saved, said: str) -> None:
    path = write(tmp_path / "pytorch_model.bin", state_dict({"transformer.wte.weight": saved}))
    with pytest.raises(ArtifactError, match=said) as caught:
        read_torch(path)
    assert caught.value.message.startswith("pytorch_model.bin")


def test_a_tensor_of_numpys_most_dimensions_is_read(tmp_path: Path) -> None:
    saved = {"a": Saved([1] * 32, [0] * 32), "b": Saved([2, 3], [1, 2], offset=1, count=7)}
    data = np.arange(16, dtype=np.float32)
    found = read_torch(write(tmp_path / "m.bin", state_dict(saved), data.tobytes()))
    assert found["a"].shape == (1,) * 32
    np.testing.assert_array_equal(found["b"], [[1, 3, 5], [2, 4, 6]])


def _lines(path: Path) -> int:
    """How many lines of the reader run."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename != torch_file.__file__:
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        index_torch(path)
    finally:
        sys.settrace(None)
    return count


def test_many_layers_in_one_opcode_take_linear_time(tmp_path: Path) -> None:
    """Each mark was looked for from the bottom of the stack: 2,000 layers took minutes."""
    few, many = (
        write(tmp_path / f"{n}.bin", state_dict({f"h.{i}": Saved([1], [1]) for i in range(n)}))
        for n in (50, 200)
    )
    assert _lines(many) < 4.4 * _lines(few)


def test_too_many_tensors(tmp_path: Path) -> None:
    saved = {f"h.{i}": Saved([1], [1]) for i in range(20_001)}
    with pytest.raises(ArtifactError, match="20001 tensors"):
        read_torch(write(tmp_path / "m.bin", state_dict(saved)))


def test_a_tensors_name_that_is_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / "m.bin", state_dict({"\ud800": Saved([1], [1])}))
    with pytest.raises(ArtifactError, match=r"the name of a tensor is no text"):
        read_torch(path)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"architectures": 7', "architectures is 7, must be a list of names"),
        ('"architectures": {"a": 1}', "architectures is {'a': 1}"),
        ('"layer_norm_epsilon": 1e-300', "layer_norm_eps is 1e-300, must be at least 1e-12"),
        ('"layer_norm_epsilon": NaN', "layer_norm_eps is nan"),
        ('"n_head": true', "num_heads is True"),
        ('"n_head": ' + "9" * 5000, "is not JSON"),
        ('"model_type": "' + "가" * 100_000 + '"', "model_type is '가"),
        ('"model_type": "\\ud800"', "holds \\ud800, half a surrogate pair"),
        ('"model_type": ' + "[" * 100_000, "is not JSON"),
    ],
)
def test_a_config_json_that_says_nonsense(v2: Path, text: str, said: str) -> None:
    message = refused(say(v2, "config.json", text))
    assert message.startswith("config.json")
    assert said in message


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('"\\ud800": 1', "holds \\ud800, half a surrogate pair"),
        ('"defaults": {"\\uDFFF": "x"}', "holds \\udfff, half a surrogate pair"),
        ('"' + "가" * 100_000 + '": 1', "is not known"),
    ],
)
def test_a_generation_json_that_says_nonsense(v1: Path, text: str, said: str) -> None:
    (v1 / "generation.json").write_text("{}")
    message = refused(say(v1, "generation.json", text))
    assert message.startswith("generation.json")
    assert said in message


def test_a_generation_json_that_is_too_long(v1: Path) -> None:
    (v1 / "generation.json").write_bytes(b" " * (16 << 20) + b"{}")
    assert refused(v1) == "generation.json is longer than 16 MiB"


def test_a_whole_pair_and_a_backslash_are_text(v1: Path) -> None:
    said = '{"template": "{q} \\ud83d\\ude42 \\\\ud800", "stop_tokens": ["</s>"]}'
    (v1 / "generation.json").write_text(said, encoding="utf-8")
    template = open_artifact(v1).generation.template
    assert template is not None
    assert [part.text for part in template.parts] == ["q", " 🙂 \\ud800"]


def test_a_weight_map_with_half_a_character(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "m", shards=2)
    index = "model.safetensors.index.json"
    said = json.loads((folder / index).read_text(encoding="utf-8"))
    said["weight_map"]["\ud800"] = "\udfff"
    (folder / index).write_text(json.dumps(said))
    assert refused(folder).startswith(f"{index} holds \\ud800")


def test_a_layer_of_five_thousand_digits(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    names = ["transformer.wte.weight", "transformer.wpe.weight"]
    names.append(f"transformer.h.{'9' * 900}.ln_1.weight")
    saved = {name: Saved([1, 1], [1, 1]) for name in names}
    write(folder / "pytorch_model.bin", state_dict(saved))
    assert "which is not part of a GPT-2" in refused(folder)
    saved[f"transformer.h.{'9' * 5000}.ln_1.weight"] = saved[names[0]]
    write(folder / "pytorch_model.bin", state_dict(saved))
    assert "the name of a tensor has 5026 characters" in refused(folder)


def test_a_hidden_layer_of_one_unit(tmp_path: Path) -> None:
    """It is a model, if an odd one."""
    folder = make_hugging_face(tmp_path / "m", hidden=1)
    model = backends.load(open_artifact(folder), "native", "int8")
    assert np.isfinite(model.run([Piece(model.open_row(), [1, 2])])).all()
    model.close()
