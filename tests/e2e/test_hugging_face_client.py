"""Hugging Face's own client, `huggingface_hub`, against a model as against a TGI server."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from tests.e2e import hugging_face_client
from tests.e2e.server import REPOSITORY, Server
from tests.e2e.stores import small, text
from tests.processes import clients_python


@pytest.fixture(scope="module")
def url(clean: Server) -> str:
    small(clean.store / "봄")
    small(clean.store / "여름", seed=8)
    return clean.url("/predictions/봄")


@pytest.fixture(
    params=["here", pytest.param("newest", marks=pytest.mark.slow)], ids=["0.29", "newest"]
)
def found(url: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Results of the version beside the server's own requirements, and of LiteLLM's."""
    if request.param == "here":
        return hugging_face_client.asked(url, "x")
    command = [clients_python(), "-m", "tests.e2e.hugging_face_client", url, "x"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    answered: dict[str, Any] = json.loads(done.stdout)
    return answered


def test_the_client_gets_texts_details_and_streams(clean: Server, found: dict[str, Any]) -> None:
    prompt = hugging_face_client.PROMPT
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 12, "logprobs": 0}}
    answer = clean.predict("봄", body)
    ours, steps = text(answer), answer.json()["logprobs"]
    assert found["text"] == "".join(found["stream"]) == ours
    assert found["full"] == prompt + ours

    whole, details = found["details"], found["details"]["details"]
    assert whole["generated_text"] == ours
    assert (details["finish_reason"], details["generated_tokens"]) == ("length", 12)
    assert [token["id"] for token in details["tokens"]] == [step["token"] for step in steps]
    assert [token["logprob"] for token in details["tokens"]] == pytest.approx(
        [step["logprob"] for step in steps], abs=1e-3
    )
    assert "".join(token["text"] for token in details["tokens"]) == ours
    assert "".join(token["text"] for token in details["prefill"]) == f"<s> {prompt}"

    stopped = found["stopped"]
    assert stopped["generated_text"] == ours[: ours.index(ours[4:6])]
    assert stopped["details"]["finish_reason"] == "stop_sequence"

    *events, last = found["stream of details"]
    assert all(event["generated_text"] is event["details"] is None for event in events)
    assert "".join(event["token"]["text"] for event in [*events, last]) == last["generated_text"]
    assert [event["index"] for event in [*events, last]] == list(range(1, 13))
    assert last["details"]["finish_reason"] == "length"
    assert (last["details"]["generated_tokens"], last["details"]["seed"]) == (12, 3)
    assert last["details"]["input_length"] == len(details["prefill"])
    assert [len(top) for top in found["likeliest"]] == [2] * 12
    of_adapter = text(clean.predict("여름", {**body, "parameters": {"max_new_tokens": 12}}))
    assert found["adapter"] == of_adapter != ours
    assert found["form"] in ("산에는", "꽃")
    assert len(set(found["drawn"])) > 1  # whatever the client's `do_sample` of false says


def test_the_client_raises_what_was_wrong(found: dict[str, Any]) -> None:
    kind, message = found["wrong"]
    assert kind == "ValidationError"
    assert message == "parameters.max_new_tokens must be from 1 to 1000000, is 0"
    assert found["no such adapter"] == ["ValidationError", "there is no model 겨울 in the store"]
    assert found["wrong form"][1].startswith("parameters.grammar: ")
    assert "parameters.watermark is not supported" in found["not done"][1]
