"""Other projects' clients against a server: they get what its own routes answer."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.e2e.clients import CHAT, FORMED, PROMPT, QUESTION, TEXT, TOKENS
from tests.e2e.server import REPOSITORY, Server, free_port
from tests.e2e.stores import events, greedy, serving, small
from tests.e2e.test_openai import TEMPLATE
from tests.engine.hugging_face import make_hugging_face
from tests.processes import clients_python

pytestmark = pytest.mark.slow

TOKEN = "infer-me"  # noqa: S105
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
MESSAGES = [{"role": "user", "content": QUESTION}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("clients")
    small(folder / "store" / TEXT, 1)
    template = {"chat_template": TEMPLATE}
    make_hugging_face(folder / "store" / CHAT, tokenizer_config=template)
    formed, kind = folder / "store" / FORMED, "byte-level"  # writes all of Unicode, so JSON, too
    make_hugging_face(formed, kind=kind, max_length=512, tokenizer_config=template)
    settings = {"INFERENCE_TOKEN": TOKEN, "GRPC_PORT": str(free_port())}
    with serving(folder / "run", folder / "store", **settings) as server:
        yield server


@pytest.fixture(scope="module")
def expected(server: Server) -> dict[str, Any]:
    """The texts of the server's own routes."""
    completion = greedy(server, TEXT, TOKENS, PROMPT, **AUTHORIZATION)
    chat = post(server, "chat/completions", {"model": CHAT, "messages": MESSAGES}).json()
    said = chat["choices"][0]["message"]["content"]
    assert completion.strip()
    assert said.strip()
    usage = chat["usage"]
    return {
        "completion": completion,
        "streamed completion": completion,
        "binary completion": completion,
        "gRPC completion": completion,
        "chat": said,
        "streamed chat": said,
        "response": said,
        "streamed response": said,
        "tokens": [usage["prompt_tokens"], usage["completion_tokens"]],
        "streamed tokens": [usage["prompt_tokens"], usage["completion_tokens"]],
        "ready": [True, True, True],
        "gRPC ready": [True, True, True],
    }


def post(server: Server, route: str, body: dict[str, Any]) -> requests.Response:
    sent = {"temperature": 0, "max_tokens": TOKENS, **body}
    return server.post(f"/v1/{route}", json=sent, headers=AUTHORIZATION)


def output(command: list[str], folder: Path = REPOSITORY, program: str = "") -> dict[str, Any]:
    """What clients print last, as JSON. To compile what they import takes longer than the rest, so
    that is kept."""
    kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        encoding="utf-8",
        env=kept,
        input=program,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def found(server: Server) -> dict[str, Any]:
    """The results of the Python clients, by client."""
    command = [clients_python(), "-m", "tests.e2e.clients", server.url(""), TOKEN]
    return output([*command, server.grpc_address, str(server.store / CHAT)])


@pytest.fixture(scope="module")
def found_by_javascript(server: Server) -> dict[str, Any]:
    """The results of the JavaScript clients, by client."""
    folder = os.environ.get("CLIENTS_JS")
    if not folder:
        pytest.skip("CLIENTS_JS names a folder where npm has installed tests/e2e/npm")
    program = (REPOSITORY / "tests" / "e2e" / "clients.mjs").read_text("utf-8")
    command = ["node", "--input-type=module", "-", server.url("/v1"), TOKEN]
    return output(command, Path(folder), program)


@pytest.mark.parametrize(
    "name", ["litellm", "openai", "langchain", "llama_index", "huggingface_hub", "kserve"]
)
def test_a_client_gets_what_the_servers_own_routes_answer(
    found: dict[str, Any], expected: dict[str, Any], name: str
) -> None:
    assert isinstance(found[name], dict), found[name]
    assert "chat" in found[name] or "completion" in found[name]
    for key in expected.keys() & found[name].keys():
        assert found[name][key] == expected[key], key


@pytest.mark.parametrize(
    ("name", "count"),
    [("litellm", 1), ("openai", 3), ("langchain", 3), ("llama_index", 2), ("huggingface_hub", 2)],
)
def test_a_client_gets_what_its_pydantic_model_says(
    found: dict[str, Any], name: str, count: int
) -> None:
    assert isinstance(found[name], dict), found[name]
    assert len(found[name]["forms"]) == count
    for form in found[name]["forms"]:
        assert is_review(form)


def is_review(form: Any) -> bool:
    return list(form) == ["감정", "certain"] and form["감정"] in ("긍정", "부정")


def test_litellm_knows_errors(found: dict[str, Any]) -> None:
    for wrong, name, status, words in (
        ("no such model", "NotFoundError", 404, "없음"),
        ("wrong key", "AuthenticationError", 401, "Authorization: Bearer"),
        ("no template", "BadRequestError", 400, "chat_template.jinja"),
    ):
        assert found["litellm"][wrong][:2] == [name, status]
        assert words in found["litellm"][wrong][2]


@pytest.mark.parametrize(
    ("name", "forms", "error"),
    [("openai", 3, "NotFoundError"), ("ai", 9, "AI_APICallError")],
)
def test_clients_for_javascript_know_texts_forms_and_errors(
    found_by_javascript: dict[str, Any],
    expected: dict[str, Any],
    name: str,
    forms: int,
    error: str,
) -> None:
    assert isinstance(found_by_javascript[name], dict), found_by_javascript[name]
    found = dict(found_by_javascript[name])
    assert [is_review(form) for form in found.pop("forms")] == [True] * forms
    kind, status, message = found.pop("no such model")
    assert (kind, status, "없음" in message) == (error, 404, True)
    assert found == {key: expected[key] for key in found}


def test_lm_eval_scores_and_continues_texts(server: Server, found: dict[str, Any]) -> None:
    """Requests with texts and with ids have the same results."""
    assert isinstance(found["lm_eval"], dict), found["lm_eval"]
    asked = {"model": CHAT, "prompt": PROMPT + " 말", "max_tokens": 0, "echo": True, "logprobs": 1}
    scored = post(server, "completions", asked).json()["choices"][0]["logprobs"]
    (written,) = post(server, "completions", {"model": CHAT, "prompt": PROMPT}).json()["choices"]
    begins = next(i for i, at in enumerate(scored["text_offset"]) if at >= len(PROMPT))
    wanted = sum(scored["token_logprobs"][begins:])
    for way in ("texts", "ids"):
        assert found["lm_eval"][way]["completion"] == [written["text"]]
        assert found["lm_eval"][way]["scores"][0][0] == pytest.approx(wanted, abs=1e-3)
    assert found["lm_eval"]["ids"]["scores"] == found["lm_eval"]["texts"]["scores"]


# Those that cannot be had here, by their calls: guidellm needs torch, Open WebUI is a server.


def usages(answer: requests.Response) -> tuple[str, list[dict[str, int] | None]]:
    """The text of a stream and the `usage` of each chunk."""
    *found, done = events(answer)
    assert done == "[DONE]"
    chunks = [json.loads(event) for event in found]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    pieces = [c["text"] if "text" in c else c["delta"].get("content") or "" for c in choices]
    return "".join(pieces), [chunk.get("usage") for chunk in chunks]


@pytest.mark.parametrize(
    ("route", "body", "limit"),
    [
        ("completions", {"model": TEXT, "prompt": PROMPT}, "max_tokens"),
        ("chat/completions", {"model": CHAT, "messages": MESSAGES}, "max_completion_tokens"),
    ],
)
def test_guidellm_counts_the_tokens_of_its_streams(
    server: Server, route: str, body: dict[str, Any], limit: str
) -> None:
    for path in ("/health", "/v1/models"):
        assert server.get(path, headers=AUTHORIZATION).ok
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**body, "stream": True, "stream_options": options, limit: TOKENS}
    asked |= {"stop": None, "ignore_eos": True}
    answer = server.post(f"/v1/{route}", json=asked, headers=AUTHORIZATION)
    assert answer.ok, answer.text
    counted = [usage["completion_tokens"] for usage in usages(answer)[1] if usage]
    assert counted == sorted(counted)
    assert counted[-1] == TOKENS


def test_open_webui_chats_and_titles_them(server: Server, expected: dict[str, Any]) -> None:
    """With what its advanced parameters send, and the prompts for a title and for tags, from whose
    answers it cuts the JSON: with a model's `response_format` there is some."""
    listed = server.get("/v1/models", headers=AUTHORIZATION).json()
    assert {model["id"] for model in listed["data"]} == {TEXT, CHAT, FORMED}
    asked: dict[str, Any] = {"model": CHAT, "messages": MESSAGES}
    advanced = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0, "seed": 1}
    advanced |= {"frequency_penalty": 0.0, "presence_penalty": 0.0, "logit_bias": {}}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    said, counted = usages(post(server, "chat/completions", {**asked, **advanced, **options}))
    assert said == expected["chat"]
    assert counted[-1] is not None

    history = f"USER: {QUESTION}\nASSISTANT: {said}"
    text: dict[str, Any] = {"type": "string", "maxLength": 20}
    shapes = {"title": text, "tags": {"type": "array", "items": text, "maxItems": 3}}
    for task, limit in (("title", 1000), ("tags", None)):
        prompt = f'### Output:\nJSON format: {{ "{task}": ... }}\n<chat_history>\n{history}'
        asked = {"model": FORMED, "messages": [{"role": "user", "content": prompt}]}
        asked |= {"stream": False, "max_tokens": None, "max_completion_tokens": limit, "seed": 1}
        plain = post(server, "chat/completions", asked)
        assert plain.json()["choices"][0]["message"]["content"]
        schema = {"type": "object", "properties": {task: shapes[task]}, "required": [task]}
        shape = {"name": task, "schema": {**schema, "additionalProperties": False}}
        asked["response_format"] = {"type": "json_schema", "json_schema": shape}
        made = post(server, "chat/completions", asked).json()["choices"][0]["message"]["content"]
        assert list(json.loads(made[made.index("{") : made.rindex("}") + 1])) == [task]
