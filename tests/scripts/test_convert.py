"""kogpt2 convert: the converted model computes the same as its source."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import tarfile
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from command.errors import Problem
from common.model_files import DELTA, visible
from engine.artifacts.artifact import EMBEDDING, OUTPUT
from engine.artifacts.open import open_artifact
from engine.artifacts.read_params import read_params
from engine.engine import Engine
from engine.native.delta import open_delta
from engine.native.delta_folder import open_folder
from engine.native.model import NativeModel
from engine.native.prepared import prepared
from engine.prepared.manifest import Manifests
from engine.sandbox.reading import Reading
from engine.settings import Settings
from engine.text.prompts import Prompts
from scripts.artifacts import tokenizer_json
from scripts.artifacts.archive import check, write_archive
from scripts.artifacts.conversion import logits
from tests.engine.artifacts.test_hugging_face import TORCH_FILE
from tests.engine.backends.running import logits_of
from tests.engine.deltas import fine_tuned, with_more_tokens
from tests.engine.engines import Request, make_talkative
from tests.engine.hugging_face import TINY, make_hugging_face, train_tokenizer, write_json
from tests.engine.models import make_artifact, params_of, spiece, write_params
from tests.engine.sentences import SENTENCES
from tests.scripts import command
from tests.scripts.test_package import harm_int8

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
TEXT = ROOT / "model_store" / "corpus" / "sowol.txt"
run = partial(command.run, "convert")


def convert(*arguments: str | Path) -> str:
    return command.output(run(*arguments))


def refused(*arguments: str | Path) -> str:
    message = command.refusal(run(*arguments), 2)
    target = Path(arguments[1])
    assert not [p for p in target.parent.iterdir() if p.name.startswith(f".{target.name}")]
    return message


def texts(*folders: Path) -> list[list[str]]:
    """Return the engine's answers to some sentences, for each folder."""
    with closing(Engine(Settings(backend="native", precision="fp32", memory_mib=256))) as engine:
        found = []
        for i, folder in enumerate(folders):
            engine.load(str(i), str(folder))
            requests = [Request(engine, str(i), s, max_new_tokens=16) for s in SENTENCES]
            found.append([request.wait().text() for request in requests])
        return found


def test_v1_becomes_a_hugging_face_directory_and_v1_again(tmp_path: Path) -> None:
    v1 = make_talkative(tmp_path / "v1", vocab=160)
    output = convert(v1, tmp_path / "hf", "--to", "hf", "--text", TEXT)
    assert "logits: 0 apart" in output
    assert "the same ids for" in output
    written = list((tmp_path / "hf").iterdir())
    assert {file.stat().st_mode & 0o777 for file in written} == {0o644}  # also the weights
    output = convert(tmp_path / "hf", tmp_path / "back", "--to", "v1")
    assert "logits: 0 apart" in output

    one, two, three = texts(v1, tmp_path / "hf", tmp_path / "back")
    assert one == two == three
    assert len(set(one)) > 1
    weights = read_params(tmp_path / "back" / "kogpt2.params")
    np.testing.assert_array_equal(weights[OUTPUT], weights[EMBEDDING])
    assert (tmp_path / "back" / "kogpt2.spiece").read_bytes() == spiece()


def test_the_name_of_the_base_is_kept(tmp_path: Path) -> None:
    v1 = make_artifact(tmp_path / "v1")
    file = v1 / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "_name_or_path": "바탕"}))
    convert(v1, tmp_path / "hf", "--to", "hf")
    convert(tmp_path / "hf", tmp_path / "back", "--to", "v1")
    for folder in ("hf", "back"):
        assert (
            json.loads((tmp_path / folder / "config.json").read_text())["_name_or_path"] == "바탕"
        )


def test_an_archive_is_a_source_as_its_folder_is(tmp_path: Path) -> None:
    write_archive(check(make_artifact(tmp_path / "봄")), tmp_path / "봄.tar.gz")
    for source in ("봄", "봄.tar.gz"):
        convert(tmp_path / source, tmp_path / f"{source}-hf", "--to", "hf")
    folders = (tmp_path / "봄-hf", tmp_path / "봄.tar.gz-hf")
    made = [{p.name: p.read_bytes() for p in folder.iterdir()} for folder in folders]
    assert made[0] == made[1]


def test_half_precision_stays_half(tmp_path: Path) -> None:
    v1 = make_artifact(tmp_path / "v1", dtype="float16")
    convert(v1, tmp_path / "hf", "--to", "hf")
    convert(tmp_path / "hf", tmp_path / "back", "--to", "v1")
    for folder in (tmp_path / "hf", tmp_path / "back"):
        assert open_artifact(folder).weights[EMBEDDING].dtype == np.float16


def test_a_file_of_torch_becomes_safetensors(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "torch", **TINY, tokenizer_config={"eos_token": "</s>"})
    (folder / "model.safetensors").rename(tmp_path / "expected")
    (folder / "pytorch_model.bin").write_bytes(TORCH_FILE.read_bytes())
    convert(folder, tmp_path / "hf", "--to", "hf")
    made = {path.name for path in (tmp_path / "hf").iterdir()}
    assert made == {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    before, after = open_artifact(folder).weights, open_artifact(tmp_path / "hf").weights
    for name, weight in before.items():
        np.testing.assert_array_equal(after[name], weight)


@pytest.mark.parametrize("backend", ["native", "mxnet"])
def test_a_prepared_model_is_found_by_its_first_load(tmp_path: Path, backend: str) -> None:
    source, to = make_artifact(tmp_path / "v1"), ["--to", "prepared"]
    output = convert(source, tmp_path / "ready", *to)
    assert "int8 against fp32: KL" in output
    files = {p.name: p.stat().st_ino for p in (tmp_path / "ready" / ".prepared").iterdir()}
    with closing(Engine(Settings(backend=backend, precision="int8", memory_mib=256))) as engine:
        engine.load("m", str(tmp_path / "ready"))
        assert Request(engine, "m", SENTENCES[0], max_new_tokens=4).wait().error is None
    after = {p.name: p.stat().st_ino for p in (tmp_path / "ready" / ".prepared").iterdir()}
    blobs = {n: t for n, t in files.items() if not n.endswith(".json")}
    assert blobs.items() <= after.items()
    assert after.keys() == files.keys()


def test_a_prepared_model_is_compared_on_lines_unless_it_is_fp32(tmp_path: Path) -> None:
    source = harm_int8(make_artifact(tmp_path / "v1"))
    (tmp_path / "시.txt").write_text("\n".join(SENTENCES), encoding="utf-8")
    done = run(source, tmp_path / "봄", "--to", "prepared", "--text", tmp_path / "시.txt")
    assert "int8 against fp32: KL" in command.output(done)
    assert done.stderr.startswith(f"{tmp_path / '봄'}: int8 changes")
    assert '"precision": "fp32"' in done.stderr
    done = run(source, tmp_path / "여름", "--to", "prepared", "--no-compare")
    assert ("int8 against" in command.output(done), done.stderr) == (False, "")
    done = run(source, tmp_path / "가을", "--to", "prepared", "--precision", "fp32")
    assert "logits: 0 apart" in command.output(done)
    assert not done.stderr


def test_a_fine_tune_becomes_a_delta_beside_int8(tmp_path: Path) -> None:
    base = make_talkative(tmp_path / "바탕", seed=7)
    whole = fine_tuned(tmp_path / "시", base)
    write_archive(check(base), tmp_path / "바탕.tar.gz")
    (tmp_path / "시.txt").write_text("\n".join(SENTENCES), encoding="utf-8")
    # Lines of one token each are no texts: the model's own are compared.
    (tmp_path / "자모.txt").write_text("a\nb\n", encoding="utf-8")
    made = []
    for i, (of, text) in enumerate((("바탕", "시.txt"), ("바탕.tar.gz", "자모.txt"))):
        options = ("--to", "delta", "--base", tmp_path / of, "--text", tmp_path / text)
        lines = convert(whole, tmp_path / str(i), *options).splitlines()
        assert re.fullmatch(r"delta: 0.1 MB; matrices: \d+ of rank \d+, \d bits(; .*)?", lines[1])
        assert lines[2].split()[:3] == ["against", "fp32", "size"]
        assert [line.split()[0] for line in lines[3:]] == ["delta", "int8"]
        kl = [float(line.split()[4]) for line in lines[3:]]
        assert kl[0] < 1.5 * kl[1]
        made.append({p.name: p.read_bytes() for p in visible(tmp_path / str(i))})
    assert made[0] == made[1]
    config = json.loads(made[0]["config.json"])
    assert (config["_name_or_path"], "kogpt2.params" in made[0]) == ("바탕", False)
    assert check(tmp_path / "0").summary.startswith("a delta of 바탕: 0.1 MB for ")


@pytest.mark.parametrize("activation", ["gelu", "gelu_new"])
def test_a_delta_becomes_a_whole_model_that_is_as_near_to_the_fine_tune(
    tmp_path: Path, activation: str
) -> None:
    base = make_artifact(tmp_path / "바탕", activation=activation)
    whole = fine_tuned(tmp_path / "시", base)
    convert(whole, tmp_path / "델타", "--to", "delta", "--base", base, "--no-compare")
    said = convert(tmp_path / "델타", tmp_path / "다시", "--to", "whole", "--base", base)
    apart = re.search(r"approximate: logits ([\d.]+)% from those of the delta", said)
    assert apart is not None
    assert float(apart[1]) < 3
    ours, theirs = (
        logits(open_artifact(path), tmp_path / "cache") for path in (whole, tmp_path / "다시")
    )
    of_base = logits(open_artifact(base), tmp_path / "cache")
    error = np.sqrt(np.mean(np.square(theirs - ours)))
    assert 0 < error < 0.2 * np.sqrt(np.mean(np.square(of_base - ours)))
    assert "cannot be made whole" in refused(
        tmp_path / "델타", tmp_path / "남", "--to", "whole", "--base", whole
    )


def test_a_looked_up_embedding_has_its_few_bits(tmp_path: Path) -> None:
    """Of a fine-tune that changes some rows in all directions alike: the rank has half of that."""
    base = make_artifact(tmp_path / "바탕")
    whole = fine_tuned(tmp_path / "시", base)
    weights = params_of(whole)
    changed = np.array(weights["_embed.weight"])
    few = slice(0, len(changed) // 11)
    changed[few] += changed.std() * np.random.default_rng(5).standard_normal(changed[few].shape)
    tied = dict.fromkeys(("_embed.weight", "_logits_proj.weight"), changed)
    write_params(whole / "kogpt2.params", {**weights, **tied})
    convert(whole, tmp_path / "델타", "--to", "delta", "--base", base, "--no-compare")
    convert(tmp_path / "델타", tmp_path / "다시", "--to", "whole", "--base", base)
    folder = open_folder(Manifests(), tmp_path / "델타")
    with (
        closing(NativeModel(prepared(open_artifact(base), "int8", tmp_path))) as model,
        closing(folder.open(open_artifact(base)).load()) as delta,
        closing(NativeModel(prepared(open_artifact(tmp_path / "다시"), "fp32", tmp_path))) as exact,
    ):
        ids = [*range(few.stop)]
        expected = logits_of(exact, ids)
        error = np.sqrt(np.square(logits_of(model, ids, delta) - expected).mean())
    assert error < 0.05 * np.std(expected)


@pytest.mark.parametrize("threads", ["1", "3"])
def test_a_delta_has_the_bits_that_a_server_prepares(
    tmp_path: Path, threads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In processes of their own: BLAS reads the number of its threads when it is imported."""
    base = make_artifact(tmp_path / "바탕", units=256, vocab=4000)
    whole = fine_tuned(tmp_path / "시", base)
    artifacts = map(open_artifact, (whole, base))
    with closing(open_delta(*artifacts, tmp_path / "cache", Reading().run)) as delta:
        prepared = delta.file.path.read_bytes()
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", threads)
    kogpt2 = (sys.executable, "-c", "from scripts.cli import main; raise SystemExit(main())")
    options = ("--base", base, "--no-compare")
    made, packed = tmp_path / "델타", tmp_path / "시.tar.gz"
    for command_line in (
        ("convert", whole, made, "--to", "delta", *options),
        ("package", whole, "--out", packed, *options),
    ):
        subprocess.run([*kogpt2, *command_line], cwd=ROOT, check=True, capture_output=True)
    assert (made / DELTA).read_bytes() == prepared
    with tarfile.open(packed) as archive:
        member = archive.extractfile(DELTA)
        assert member is not None
        assert member.read() == prepared


@pytest.mark.parametrize("tied", [True, False])
def test_a_delta_with_tokens_of_its_own_becomes_whole_with_them(tmp_path: Path, tied: bool) -> None:
    size = train_tokenizer("metaspace").get_vocab_size()
    base = make_hugging_face(tmp_path / "바탕", units=128, vocab=size)
    whole = with_more_tokens(tmp_path / "시", base, ["<행>", "<연>", "<끝>"], tied=tied)
    convert(whole, tmp_path / "델타", "--to", "delta", "--base", base, "--no-compare")
    convert(tmp_path / "델타", tmp_path / "다시", "--to", "whole", "--base", base)
    ours, theirs = (open_artifact(path) for path in (whole, tmp_path / "다시"))
    assert theirs.config.vocab_size == ours.config.vocab_size == size + 3
    for name in (EMBEDDING,) if tied else (EMBEDDING, OUTPUT):
        expected, found = ours.weights[name], theirs.weights[name]
        error = np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)
        assert error.max() < 0.05, name
        assert (error[-3:] < 0.01).all(), name  # rows that the base lacks are kept in fp16
    text = "<행>" + SENTENCES[0] + "<끝>"
    ids = [Prompts(artifact).encode(text) for artifact in (ours, theirs)]
    assert ids[0] == ids[1]
    assert {size, size + 2} < set(ids[0])


def test_what_is_no_delta_is_refused_with_the_reason(tmp_path: Path) -> None:
    base = make_talkative(tmp_path / "바탕", seed=7)
    options = (tmp_path / "델타", "--to", "delta", "--base", base)
    other = make_talkative(tmp_path / "남", seed=99)
    assert "남 cannot be a delta of 바탕: it is too far from its base" in refused(other, *options)
    wide = make_artifact(tmp_path / "큰 것", units=128)
    assert "its units is 128, that of its base 64" in refused(wide, *options)
    whole = fine_tuned(tmp_path / "시", base)
    write_json(whole / "serving.json", {"precision": "fp32"})
    assert "says that the model must be whole" in refused(whole, *options)
    assert "need --base" in refused(whole, tmp_path / "델타", "--to", "delta")
    message = refused(whole, tmp_path / "다시", "--to", "whole", "--base", base)
    assert "시 holds neither a delta nor an adapter: only these become whole" in message


# Refusals


def test_lines_that_are_not_utf_8_are_refused(tmp_path: Path) -> None:
    lines = tmp_path / "문장.txt"
    lines.write_text("나는 오늘\n", encoding="cp949")
    message = refused(
        make_artifact(tmp_path / "v1"), tmp_path / "hf", "--to", "hf", "--text", lines
    )
    assert "문장.txt is not UTF-8" in message
    assert "iconv -f cp949" in message


def test_a_model_that_v1_cannot_express_is_refused(tmp_path: Path) -> None:
    folder = make_hugging_face(tmp_path / "m")
    assert "--spiece" in refused(folder, tmp_path / "v1", "--to", "v1")
    path = tmp_path / "other.spiece"
    path.write_bytes(spiece())
    assert "differ:" in refused(folder, tmp_path / "v1", "--to", "v1", "--spiece", path)
    untied = make_hugging_face(tmp_path / "untied", config={"tie_word_embeddings": False})
    assert "cannot become a v1 model" in refused(untied, tmp_path / "v1", "--to", "v1")
    assert not (tmp_path / "v1").exists()


@pytest.mark.parametrize(
    ("option", "kind"), [(("--spiece", "가.spiece"), "v1"), (("--precision", "fp32"), "prepared")]
)
def test_an_option_of_another_kind_is_refused(
    tmp_path: Path, option: tuple[str, str], kind: str
) -> None:
    message = refused(tmp_path / "모델", tmp_path / "hf", "--to", "hf", *option)
    assert message == f"convert: {option[0]} is for --to {kind}\n"


def test_a_target_that_exists_and_a_source_without_a_model_are_refused(tmp_path: Path) -> None:
    folder, empty = make_artifact(tmp_path / "m"), tmp_path / "빈 폴더"
    empty.mkdir()
    assert "exists" in refused(folder, empty, "--to", "hf")
    assert list(empty.iterdir()) == []
    message = refused(empty, tmp_path / "hf", "--to", "hf")
    assert "cannot be converted" in message
    assert "holds no model" in message


def test_a_template_is_kept_only_if_its_text_is_cut_the_same(tmp_path: Path) -> None:
    v1 = make_artifact(tmp_path / "v1")
    write_json(v1 / "generation.json", {"template": "<usr>{text}<sys>", "strip": [" "]})
    (v1 / "chat_template.jinja").write_text("<usr>{{ messages[-1].content }}<sys>", "utf-8")
    output = convert(v1, tmp_path / "hf", "--to", "hf")
    assert "generation.json is left out" in output
    chat, own = ((f / "chat_template.jinja").read_text("utf-8") for f in (tmp_path / "hf", v1))
    assert chat == own
    assert not (tmp_path / "hf" / "generation.json").exists()
    write_json(v1 / "generation.json", {"template": "{text}", "strip": [" "]})
    convert(v1, tmp_path / "hf2", "--to", "hf")
    kept, own = (Prompts(open_artifact(f)).encode("안녕") for f in (tmp_path / "hf2", v1))
    assert kept == own


def test_a_unigram_model_is_refused(tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4),
        model_writer=model,
        model_type="unigram",
        vocab_size=103,
        minloglevel=2,
    )
    path = tmp_path / "unigram.spiece"
    path.write_bytes(model.getvalue())
    with pytest.raises(Problem, match="is no BPE model"):
        tokenizer_json.convert(path)
