"""A file that is almost named as one that is read is reported with the right name."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.misnamed import READ, misnamed
from engine.artifacts import artifact, generation_config, hugging_face
from engine.text import files
from handlers.tensors.files import SHAPES
from serving.models import model_settings
from tests.serving.store.archives import touch


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("Config.json", "config.json"),
        ("config (1).json", "config.json"),
        ("config - 복사본.json", "config.json"),
        ("config.json.txt", "config.json"),
        ("시\\config.json", "config.json"),
        ("code\\inference.py", "code/inference.py"),
        ("Code/Inference.py", "code/inference.py"),
        ("inference (2).py", "inference.py"),
        ("generations.json", "generation.json"),
        ("generation-config.json", "generation_config.json"),
        ("genaration.json", "generation.json"),
        ("chat_template.jinja2", "chat_template.jinja"),
        ("Serving.JSON", "serving.json"),
        ("mar-inf/manifest.json", "MAR-INF/MANIFEST.json"),
    ],
)
def test_a_file_with_almost_the_right_name_is_reported(
    tmp_path: Path, path: str, meant: str
) -> None:
    touch(tmp_path, path, "시.params", "시.spiece")
    assert misnamed(tmp_path) == [f"{path!r} is not read: {meant} is the name of such a file"]


def test_files_of_other_programs_and_those_that_are_read_are_not_reported(tmp_path: Path) -> None:
    others = (
        "vocab.json", "merges.txt", "added_tokens.json", "preprocessor_config.json", "README.md",
        "quantization_config.json", "tokenizer.model", "trainer_state.json", "시.spiece",
        "code/inference_utils.py", "code/requirements.txt", "onnx/Config.json", "._Config.json",
        "config.json.bak", "generation2.json",
    )  # fmt: skip
    touch(tmp_path, *READ, *others, "code/inference.py")
    assert misnamed(tmp_path) == []
    assert misnamed(tmp_path / "없다") == []


def test_all_files_that_change_an_answer_are_known() -> None:
    assert set(READ) >= {
        artifact.CONFIG_FILE, generation_config.FILE, generation_config.HUGGING_FACE_FILE,
        hugging_face.TOKENIZER_FILE, files.CONFIG, files.SPECIAL_TOKENS, files.CHAT_TEMPLATE,
        SHAPES, model_settings.FILE,
    }  # fmt: skip
