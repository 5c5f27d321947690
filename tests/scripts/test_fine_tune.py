"""kogpt2 fine-tune trains and packs; the archives of model_store/ continue their poems."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import sentencepiece

from command.documents import read_documents
from command.errors import Problem
from engine.artifacts.artifact import Artifact
from engine.artifacts.open import open_artifact
from engine.engine import Engine
from engine.settings import Settings
from scripts.artifacts.archive import check, write_archive
from scripts.artifacts.training_options import FineTune
from scripts.fine_tune import DEMO
from tests.engine.engines import Request
from tests.engine.hugging_face import make_hugging_face
from tests.lazy import training
from tests.scripts import command
from tests.serving.store.archives import unpack

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
STORE = ROOT / "model_store"
POEMS = """# 메아리
산에서 부르면 산이 답하고
들에서 부르면 들이 답하네
답하는 소리는 누구의 소리

# 개울
개울물 흐르네 돌 사이로
돌은 그대로 있는데
물은 어디로 가나
"""
TINY = (
    *("--steps=15", "--base-steps=15", "--units=16", "--layers=1", "--heads=2"),
    *("--vocab-size=420", "--max-length=32"),
)
run = partial(command.run, "fine-tune")


def unpacked(archive: Path, folder: Path) -> Artifact:
    unpack(archive, folder)
    return open_artifact(folder)


def losses(output: str) -> list[tuple[float, float]]:
    """First and last loss of each training that the output tells of."""
    return [(float(a), float(b)) for a, b in re.findall(r"loss (\S+) -> (\S+) in", output)]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "poems.txt"
    path.write_text(POEMS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(text: Path) -> tuple[Path, str]:
    """An archive trained from nothing, and what the script said."""
    out = text.with_name("model.tar.gz")
    return out, command.output(run("--text", text, "--out", out, "--base-text", text, *TINY))


def test_a_model_is_trained_that_the_engine_opens(
    trained: tuple[Path, str], tmp_path: Path
) -> None:
    artifact = unpacked(trained[0], tmp_path / "model")
    names = sorted(p.name for p in artifact.path.iterdir())
    assert names == ["config.json", "model.params", "model.spiece"]
    config = artifact.config
    assert (config.units, config.num_layers, config.num_heads) == (16, 1, 2)
    assert (config.vocab_size, config.max_length, config.activation) == (420, 32, "gelu")
    tokenizer = sentencepiece.SentencePieceProcessor(model_file=str(artifact.tokenizer_file))
    pieces = [tokenizer.id_to_piece(i) for i in range(4)]
    assert pieces == ["<unk>", "<pad>", "<s>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("물은 어디로 가나")) == "물은 어디로 가나"
    (base_first, base_last), (first, last) = losses(trained[1])
    assert base_last < base_first
    assert last < first < base_first


def test_the_same_seed_gives_the_same_bytes(
    trained: tuple[Path, str], text: Path, tmp_path: Path
) -> None:
    again = tmp_path / "model.tar.gz"
    options = ["--text", text, "--out", again, "--base-text", text, *TINY]
    program = [sys.executable, "-m", "scripts.start", "fine-tune", *options]  # with its own hashes
    subprocess.run(program, check=True, capture_output=True, timeout=120, cwd=ROOT)
    assert again.read_bytes() == trained[0].read_bytes()


def base_name(artifact: Artifact) -> object:
    return json.loads((artifact.path / "config.json").read_text("utf-8")).get("_name_or_path")


def test_a_base_is_trained_further_with_its_tokenizer(
    trained: tuple[Path, str], text: Path, tmp_path: Path
) -> None:
    base = unpacked(trained[0], tmp_path / "base")
    out = tmp_path / "more.tar.gz"
    options = ("--base", base.path, "--steps", "5", "--seed", "2")
    more = command.output(run("--text", text, "--out", out, *options))
    assert losses(more)[0][0] < losses(trained[1])[0][0]
    artifact = unpacked(out, tmp_path / "more")
    assert artifact.tokenizer_file.read_bytes() == base.tokenizer_file.read_bytes()
    assert artifact.config == base.config
    # Only a base that the user has is in a store.
    assert base_name(artifact) == "base"
    assert base_name(base) is None


def test_mistakes_are_explained_before_training(text: Path, tmp_path: Path) -> None:
    empty, korean, taken = (tmp_path / name for name in ("empty.txt", "cp949.txt", "봄.tar.gz"))
    taken.write_bytes(b"mine")
    empty.write_text("# 제목\n\n", encoding="utf-8")
    korean.write_bytes(POEMS.encode("cp949"))
    out = tmp_path / "out.tar.gz"
    for args, message in (
        (("--text", empty, "--out", out), "holds no text"),
        (("--text", korean, "--out", out), "is not UTF-8"),
        (("--text", tmp_path / "none.txt", "--out", out), "cannot read"),
        (("--text", text, "--out", tmp_path / "none" / "a.tar.gz"), "cannot write"),
        (("--text", text, "--out", tmp_path / "a.zip"), "must be a file NAME.tar.gz"),
        (("--text", text, "--out", out, "--heads", "3"), "--heads 3 does not divide"),
        (("--text", text), "give --text and --out, or --demo"),
        (
            ("--text", text, "--out", out, "--base", tmp_path, "--base-steps", "9"),
            "--base-steps is for a new base: leave out --base",
        ),
        (("--text", text, "--out", out, "--steps", "0"), "0 is not in the range x>=1"),
        (("--text", text, "--out", taken), "exists"),
        (
            ("--text", text, "--out", out, "--base-text", text, "--vocab-size", "5000"),
            "too short for a vocabulary of 5000 pieces: give more text, or",
        ),
    ):
        done = run(*args)
        assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert taken.read_bytes() == b"mine"
    assert {path.name for path in tmp_path.iterdir()} == {empty.name, korean.name, taken.name}
    with pytest.raises(Problem, match="more characters than a vocabulary of 10 pieces can hold"):
        training.train_tokenizer(read_documents(text), 10)


def test_a_base_that_cannot_be_trained_is_refused_with_what_to_do(
    text: Path, tmp_path: Path
) -> None:
    base, out = make_hugging_face(tmp_path / "hf"), tmp_path / "out.tar.gz"
    write_archive(check(base), packed := tmp_path / "hf.tar.gz")
    for given in (base, packed):
        with pytest.raises(Problem, match=r"use transformers' Trainer.*docs/models/\S+\.md"):
            training.fine_tune(given, text, out, FineTune(seed=1))
    with pytest.raises(Problem, match=r"cannot be read as a model: .* holds no model"):
        training.fine_tune(text.parent, text, out, FineTune(seed=1))


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine with the archives of model_store/."""
    folder = tmp_path_factory.mktemp("demos")
    settings = Settings(backend="native", precision="fp32", memory_mib=256)
    with closing(Engine(settings)) as engine:
        for name in DEMO:
            unpack(STORE / f"{name}.tar.gz", folder / name)
            engine.load(name, str(folder / name))
        yield engine


def continuation(engine: Engine, name: str, prompt: str) -> str:
    return Request(engine, name, prompt).wait().text().strip()


@pytest.mark.parametrize(
    ("name", "line", "rest"),
    [
        ("sowol", "나 보기가 역겨워", "가실 때에는 말없이 고이 보내 드리우리다. 영변에 약산"),
        ("sowol", "산에는 꽃 피네", "꽃이 피네 갈 봄 여름 없이"),
        ("sowol", "엄마야 누나야", "강변 살자, 뜰에는 반짝이는 금모래 빛,"),
        ("dongju", "죽는 날까지 하늘을 우러러", "한 점 부끄럼이 없기를, 잎새에 이는 바람에도"),
        ("dongju", "계절이 지나가는 하늘에는", "가을로 가득 차 있습니다. 나는 아무 걱정도 없이"),
        ("dongju", "산모퉁이를 돌아", "논가 외딴 우물을 홀로 찾아가선 가만히 들여다봅니다."),
    ],
)
def test_a_demo_continues_its_poems(demos: Engine, name: str, line: str, rest: str) -> None:
    assert continuation(demos, name, line).startswith(rest)


@pytest.mark.parametrize("name", DEMO)
def test_a_demo_writes_json_and_any_character(demos: Engine, name: str) -> None:
    record = {"title": {"enum": ['꽃 / "봄"', "뷁😀"]}, "short": {"type": "boolean"}}
    form = {"type": "object", "properties": record, "required": list(record)}
    text = Request(demos, name, "나 보기가 역겨워", json_schema=form).wait().text()
    assert json.loads(text)["title"] in record["title"]["enum"]
    assert Request(demos, name, "하늘", choice=["{[#\n\t뷁]}"]).wait().text() == "{[#\n\t뷁]}"


def test_the_demos_are_small_differ_and_end_where_a_poem_ends(demos: Engine) -> None:
    assert all((STORE / f"{name}.tar.gz").stat().st_size <= 5_000_000 for name in DEMO)
    assert continuation(demos, "dongju", "오늘 밤에도 별이") == "바람에 스치운다."
    for prompt in ("나 보기가 역겨워", "하늘", "바람이 불어"):
        sowol, dongju = (continuation(demos, name, prompt) for name in DEMO)
        assert sowol != dongju
