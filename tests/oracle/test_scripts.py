"""A script with `load_model` and `predict` around a Flan-T5, with transformers itself."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import mms
import pytest

from handlers.user_code.entry_point import find_script
from handlers.user_code.messages import Answer, Part, Request
from handlers.user_code.process import ScriptProcess
from tests.engine.models import SENTENCES
from tests.oracle import oracle

pytestmark = pytest.mark.oracle

TIMEOUT_S = 180.0

SCRIPT = """
import json

from transformers import AutoModelForSeq2SeqLM, AutoTokenizer


def load_model(model_dir):
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForSeq2SeqLM.from_pretrained(model_dir)
    return model, tokenizer


def predict(model, payload):
    network, tokenizer = model
    request = json.loads(payload[0]["body"].decode("utf-8"))
    ids = tokenizer(request["inputs"], return_tensors="pt").input_ids
    output = network.generate(ids, **request["parameters"])
    return [{"generated_text": tokenizer.decode(output[0], skip_special_tokens=True)}]
"""

# A small Flan-T5 with random weights, and what it answers.
MAKE = """
import json, sys
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

folder, prompt, sentences = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
words = sorted({word for sentence in sentences for word in sentence.split()})
vocabulary = {word: i for i, word in enumerate(["<pad>", "</s>", "<unk>", *words])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
)
torch.manual_seed(7)
model = T5ForConditionalGeneration(
    T5Config(
        vocab_size=len(vocabulary), d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, decoder_start_token_id=0,
    )
).eval()
model.save_pretrained(folder)
tokenizer.save_pretrained(folder)
output = model.generate(tokenizer(prompt, return_tensors="pt").input_ids, max_new_tokens=8)
print(json.dumps(tokenizer.decode(output[0], skip_special_tokens=True)))
"""


def test_a_flan_t5_answers_as_transformers_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "flan"
    folder.mkdir()
    prompt = "나는 아침에 일어나서"
    made = oracle.run("-c", MAKE, folder, prompt, json.dumps(SENTENCES))
    expected = json.loads(made.splitlines()[-1])
    assert expected.strip()
    (folder / "inference.py").write_text(SCRIPT, encoding="utf-8")

    # The script's process in the oracle's environment, with Multi Model Server's classes beside.
    library = tmp_path / "library"
    library.mkdir()
    (library / "mms").symlink_to(Path(mms.__file__).parent)
    monkeypatch.setattr(sys, "executable", oracle.python())
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(oracle.ROOT), str(library)]))
    script = find_script(folder)
    assert script is not None
    process = ScriptProcess("flan", script.spec("flan"), TIMEOUT_S)
    try:
        process.start()
        process.wait_until_loaded()
        body = json.dumps({"inputs": prompt, "parameters": {"max_new_tokens": 8}}).encode()
        parts = [Part("body", "application/json", body)]
        for _ in range(2):
            (answer,) = process.answer([Request("1", {}, parts)], TIMEOUT_S)
            assert isinstance(answer, Answer), answer
            assert json.loads(answer.body) == {"generated_text": expected}
    finally:
        process.stop()
