"""docs/models/handlers.md is true: its models are made, its commands run."""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import pytest

from tests.e2e.console import blocks, printed, session
from tests.e2e.server import REPOSITORY, Server

PAGE = REPOSITORY / "docs" / "models" / "handlers.md"
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


def write_models(store: Path) -> None:
    """Each listing is a model; the blocks after it that begin with a path are its files."""
    folder, listed = store, set[str]()
    for text in blocks(PAGE):
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


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    write_models(clean.store)
    for name in ("guide", "plain"):
        with tarfile.open(REPOSITORY / "model_store" / "sowol.tar.gz") as demo:
            demo.extractall(clean.store / name, filter="data")
    (clean.store / "guide" / "code").mkdir()
    (clean.store / "guide" / "code" / "inference.py").write_text(GUIDE, encoding="utf-8")
    return clean


@pytest.mark.parametrize(("command", "shown"), session(PAGE))
def test_the_commands_answer_as_they_are_shown(server: Server, command: str, shown: str) -> None:
    # The reader's folder is the store.
    answer = printed(server, command.replace("path model_store", "path ."), server.store)
    if shown:
        assert json.loads(answer) == json.loads(shown), answer
    else:
        assert not answer


@pytest.mark.slow
def test_the_guides_loop_gives_the_built_in_handlers_text_and_steps(server: Server) -> None:
    guide, plain = (server.predict(name, "나는").json() for name in ("guide", "plain"))
    assert guide[:2] == plain[:2]
    assert guide[1] > 20
