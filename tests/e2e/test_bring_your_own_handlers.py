"""docs/models/handlers.md is true: its models are made, its commands run."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.e2e.server import REPOSITORY, Server

DOCUMENTS = REPOSITORY / "docs" / "models"
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
DEMO = ("sowol.params", "sowol.spiece", "config.json")
# A script for the AWS guide to KoGPT2, at the demo model's size.
GUIDE = """import glob
import json
import os
import time

import gluonnlp as nlp
import mxnet as mx
from gluonnlp.data import SentencepieceTokenizer
from kogpt2.model.gpt import GPT2Model
from kogpt2.utils import get_tokenizer

ctx = mx.cpu()


def model_fn(model_dir):
    spiece = get_tokenizer()
    vocab = nlp.vocab.BERTVocab.from_sentencepiece(
        spiece,
        mask_token=None,
        sep_token=None,
        cls_token=None,
        unknown_token="<unk>",
        padding_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
    )
    net = GPT2Model(
        units=128, max_length=256, num_heads=4, num_layers=4, dropout=0.1, vocab_size=len(vocab)
    )
    net.load_parameters(glob.glob(os.path.join(model_dir, "*.params"))[0], ctx=ctx)
    return net, vocab, SentencepieceTokenizer(spiece, num_best=0, alpha=0)


def transform_fn(model, body, content_type, accept):
    net, vocab, tokenizer = model
    text, steps, started = json.loads(body), 0, time.time()
    while True:
        ids = [vocab[vocab.bos_token]] + vocab[tokenizer(text)]
        logits = net(mx.nd.array([ids], ctx=ctx))[0]
        best = mx.nd.argmax(logits, axis=-1).squeeze(axis=0).astype("int").asnumpy().tolist()
        piece = vocab.to_tokens(best)[-1]
        if piece == "</s>":
            break
        text += piece.replace("▁", " ")
        steps += 1
    return json.dumps([text, steps, time.time() - started]), content_type
"""


def blocks(document: str, kind: str | None = None) -> list[tuple[str, str]]:
    found = BLOCK.findall((DOCUMENTS / document).read_text(encoding="utf-8"))
    return [(k, text) for k, text in found if kind in (None, k)]


def write_models(store: Path) -> None:
    """Each listing is a model; the blocks after it that begin with a path are its files."""
    folder, listed = store, set[str]()
    for _, text in blocks("handlers.md"):
        first, _, rest = text.partition("\n")
        if first.endswith("/"):
            assert not listed, f"{folder.name} lacks {listed}"
            folder, listed = store / first.rstrip("/"), {line.strip() for line in rest.splitlines()}
            with tarfile.open(REPOSITORY / "model_store" / "sowol.tar.gz") as demo:
                for name in sorted(listed & set(DEMO)):
                    demo.extract(name, folder, filter="data")
            listed -= set(DEMO)
        elif first.startswith("# "):
            path = first.removeprefix("# ")
            listed.remove(path)
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(rest, encoding="utf-8")
    assert not listed, f"{folder.name} lacks {listed}"


def commands() -> list[tuple[str, str]]:
    """(command, shown output) of every `$ ` line."""
    found = []
    for _, text in blocks("handlers.md", "console"):
        for part in ("\n" + text).split("\n$ ")[1:]:
            command, _, output = part.partition("\n")
            found.append((command, output.strip()))
    return found


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    write_models(clean.store)
    for name in ("guide", "plain"):
        with tarfile.open(REPOSITORY / "model_store" / "sowol.tar.gz") as demo:
            demo.extractall(clean.store / name, filter="data")
    (clean.store / "guide" / "code").mkdir()
    (clean.store / "guide" / "code" / "inference.py").write_text(GUIDE, encoding="utf-8")
    return clean


def run(server: Server, command: str) -> str:
    """In the folder that a reader is in: the models, or `model_store` with them."""
    line = command.replace("localhost:8080", f"127.0.0.1:{server.port}")
    line = line.replace("localhost:8081", f"127.0.0.1:{server.management_port}")
    arguments = shlex.split(line.replace("--export-path model_store", "--export-path ."))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if arguments[0] == "curl":
        arguments.append("--silent")
    done = subprocess.run(
        arguments,
        cwd=server.store,
        capture_output=True,
        timeout=90,
        check=True,
        env={**os.environ, "PATH": path},
    )
    return done.stdout.decode()


@pytest.mark.parametrize(("command", "shown"), commands())
def test_the_commands_answer_as_they_are_shown(server: Server, command: str, shown: str) -> None:
    answer = run(server, command)
    if shown:
        assert json.loads(answer) == json.loads(shown), answer
    else:
        assert not answer


def test_the_guides_loop_gives_the_built_in_handlers_text_and_steps(server: Server) -> None:
    guide, plain = (server.predict(name, "나는").json() for name in ("guide", "plain"))
    assert guide[:2] == plain[:2]
    assert guide[1] > 20


def test_the_korean_document_has_the_same_examples() -> None:
    assert blocks("handlers.ko.md") == blocks("handlers.md")
