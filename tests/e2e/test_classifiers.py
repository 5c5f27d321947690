"""Classifiers answer on every contract; what generates text refuses them, and nothing is lost."""

from __future__ import annotations

import csv
import io
import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
import tritonclient.grpc

from tests.e2e.server import Server
from tests.e2e.stores import SHORT, packed, small
from tests.e2e.test_triton import given
from tests.engine.adapters import make_adapter
from tests.engine.hugging_face import make_hugging_face
from tests.scripts.command import output, run

pytestmark = pytest.mark.slow

LABELS = ["부정", "중립", "긍정"]
NAMED = ["O", "B-사람", "I-사람"]
TEXT = "산에는 꽃 피네"


@pytest.fixture(scope="module")
def server(clean: Server, tmp_path_factory: pytest.TempPathFactory) -> Server:
    made = make_hugging_face(clean.store / "감정", labels=LABELS, max_length=64)
    packed(made, clean.store / "sentiment.tar.gz")
    make_hugging_face(
        clean.store / "이름", labels=NAMED, of_tokens=True, kind="byte-level", max_length=64
    )
    base = small(clean.store / "글")
    head = {"base_model.model.score.weight": np.eye(2, 128, dtype=np.float32)}
    config = {"task_type": "SEQ_CLS"}
    make_adapter(clean.store / "글-감정", base, config=config, weights=head)
    return clean


def classify(server: Server, inputs: Any, name: str = "감정", **parameters: Any) -> Any:
    body = {"inputs": inputs, **({"parameters": parameters} if parameters else {})}
    answer = server.predict(quote(name), body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_texts_lists_and_pairs(server: Server) -> None:
    [best] = classify(server, TEXT)
    assert best["label"] in LABELS
    assert 1 / 3 < best["score"] < 1
    assert classify(server, [TEXT] * 3) == [best] * 3
    every = classify(server, TEXT, top_k=None)
    assert [entry["score"] for entry in every] == sorted((e["score"] for e in every), reverse=True)
    assert sum(entry["score"] for entry in every) == pytest.approx(1)
    assert classify(server, {"text": TEXT, "text_pair": "봄"}).keys() == {"label", "score"}
    assert server.predict(
        quote("감정"), TEXT.encode(), **{"Content-Type": "text/plain"}
    ).json() == [best]
    headers = {"X-Amzn-SageMaker-Target-Model": "sentiment.tar.gz"}
    answer = server.post("/invocations", json={"inputs": TEXT}, headers=headers)
    assert answer.json() == [best]


def test_a_line_is_a_text_or_a_list_or_a_pair(server: Server) -> None:
    pair = {"text": TEXT, "text_pair": "봄"}
    lines = [
        {"inputs": TEXT, "parameters": {"top_k": 2}},
        {"inputs": [TEXT, "꽃"]},
        {"inputs": pair},
    ]
    body = "\n".join(json.dumps(line, ensure_ascii=False) for line in [*lines, {"inputs": ""}])
    headers = {"Content-Type": "application/jsonlines"}
    answer = server.post("/predictions/감정", data=body.encode(), headers=headers)
    *good, wrong = map(json.loads, answer.content.splitlines())
    assert good == [server.predict(quote("감정"), line).json() for line in lines]
    assert wrong["error"]["code"] == 400


def test_csv_in_and_out(server: Server) -> None:
    body = 'inputs\n산에는 꽃 피네\n"꽃이, 피네"\n'
    answer = server.predict(quote("감정"), body.encode(), **{"Content-Type": "text/csv"})
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.content.decode())))
    wanted = classify(server, [TEXT, "꽃이, 피네"])
    assert [(row["label"], float(row["score"])) for row in rows] == [
        (entry["label"], pytest.approx(entry["score"])) for entry in wanted
    ]


def test_it_is_listed_as_what_it_is_and_counted(server: Server) -> None:
    before = metric(server)
    classify(server, [TEXT] * 3)
    classify(server, TEXT, "이름")
    assert metric(server) - before == 3
    listed = {m["id"]: m.get("task") for m in server.get("/v1/models").json()["data"]}
    assert listed["감정"] == server.get(f"/v1/models/{quote('감정')}").json()["task"]
    assert (listed["감정"], listed["이름"]) == ("text-classification", "token-classification")
    assert listed["글"] is None
    loaded = {m["modelName"]: m.get("task") for m in server.get("/models").json()["models"]}
    assert loaded["감정"] == "text-classification"


def metric(server: Server) -> float:
    pattern = r'^kogpt2_model_texts_total{model="감정"} (\S+)$'
    found = re.search(pattern, server.get("/metrics").text, re.MULTILINE)
    return float(found[1]) if found else 0


def test_a_request_for_a_stream_is_answered_whole(server: Server) -> None:
    body = {"inputs": TEXT, "stream": True}
    answer = server.predict(quote("감정"), body)
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == classify(server, TEXT)
    assert server.predict(quote("감정"), {"inputs": [TEXT], "stream": True}).status_code == 200


def test_kogpt2_ask_prints_the_label(server: Server) -> None:
    printed = output(run("ask", "감정", TEXT, "--url", server.url("")))
    assert json.loads(printed) == classify(server, TEXT)[0]


def test_json_lines(server: Server) -> None:
    lines = [json.dumps({"inputs": text}) for text in (TEXT, [TEXT, "봄"], " ")]
    body = "\n".join(lines).encode()
    answer = server.predict(quote("감정"), body, **{"Content-Type": "application/jsonlines"})
    first, second, wrong = map(json.loads, answer.text.splitlines())
    assert (first, second) == (classify(server, TEXT), classify(server, [TEXT, "봄"]))
    assert wrong["error"]["code"] == 400


def test_entities_are_parts_of_the_text_in_whole_syllables(server: Server) -> None:
    text = "김철수는 🙂 뷁뷁 서울에"
    every = classify(server, text, "이름", ignore_labels=[])
    for entity in every:
        assert entity["entity"] in NAMED
        assert entity["word"] == text[entity["start"] : entity["end"]].strip()
        assert "\ufffd" not in entity["word"]
    groups = classify(server, text, "이름", aggregation_strategy="simple", ignore_labels=[])
    assert "".join(text[g["start"] : g["end"]] for g in groups).replace(" ", "") == text.replace(
        " ", ""
    )
    assert {group["entity_group"] for group in groups} <= {"O", "사람"}
    assert classify(server, [text], "이름", ignore_labels=[]) == [every]
    answer = server.predict(quote("이름"), {"inputs": {"text": text, "text_pair": "봄"}})
    assert (answer.status_code, "text_pair" in answer.json()["message"]) == (400, True)


def test_single_texts_beside_a_list_of_a_thousand(server: Server) -> None:
    texts = [f"{TEXT} {i}" for i in range(1000)]
    with ThreadPoolExecutor() as pool:
        listed = pool.submit(classify, server, texts)
        alone = [classify(server, texts[i])[0] for i in range(20)]
        found = listed.result()
    assert len(found) == 1000
    assert found[:20] == alone


def test_the_open_inference_protocol(server: Server) -> None:
    texts = [TEXT, "봄"]
    every = classify(server, texts, top_k=None)
    with tritonclient.grpc.InferenceServerClient(server.grpc_address) as client:
        about = client.get_model_metadata("감정", as_json=True)
        assert about["platform"] == "kogpt2_classifier"
        shapes = {output["name"]: output["shape"] for output in about["outputs"]}
        assert shapes == {"label": ["-1"], "score": ["-1"], "logits": ["-1", "3"]}
        given_texts = given(np.array([text.encode() for text in texts], np.object_))
        answer = client.infer("감정", [given_texts])
    assert [label.decode() for label in answer.as_numpy("label")] == [e[0]["label"] for e in every]
    np.testing.assert_allclose(answer.as_numpy("score"), [e[0]["score"] for e in every], atol=1e-6)
    assert answer.as_numpy("logits").shape == (2, 3)
    body = {"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": texts}]}
    outputs = server.post(f"/v2/models/{quote('감정')}/infer", json=body).json()["outputs"]
    assert [output["data"] for output in outputs if output["name"] == "label"] == [
        [e[0]["label"] for e in every]
    ]
    tokens = server.post(f"/v2/models/{quote('이름')}/infer", json=body).json()["outputs"]
    assert [output["name"] for output in tokens] == ["entities"]
    assert [json.loads(text) for text in tokens[0]["data"]] == classify(server, texts, "이름")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"model": "감정", "messages": [{"role": "user", "content": "?"}]}),
        ("/v1/completions", {"model": "감정", "prompt": TEXT}),
        ("/v1/responses", {"model": "감정", "input": TEXT}),
        (f"/v2/models/{quote('감정')}/generate", {"text_input": TEXT}),
        ("/generate", {"inputs": TEXT, "parameters": {"adapter_id": "감정"}}),
    ],
)
def test_what_generates_text_is_refused(server: Server, path: str, body: Any) -> None:
    answer = server.post(path, json=body)
    assert (answer.status_code, "classifier" in answer.text) == (400, True), answer.text
    assert "Traceback" not in answer.text


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"inputs": [TEXT, " "]}, 400, "inputs.1 is empty"),
        ({"inputs": [TEXT, "봄 " * 100]}, 413, "inputs.1 has 201 tokens"),
        ({"inputs": TEXT, "parameters": {"max_new_tokens": 3}}, 400, "parameters.max_new_tokens"),
    ],
)
def test_refusals(server: Server, body: Any, status: int, message: str) -> None:
    answer = server.predict(quote("감정"), body)
    found = (answer.status_code, message in answer.json()["message"])
    assert found == (status, True), answer.text
    classify(server, "봄 " * 100, truncation=True)


def test_an_adapter_with_a_head(server: Server) -> None:
    [best] = classify(server, TEXT, "글-감정")
    assert best["label"] in ("LABEL_0", "LABEL_1")
    models = server.get("/models").json()["models"]
    assert {m["modelName"]: m.get("baseModel") for m in models}["글-감정"] == "글"


def test_a_list_for_a_model_of_texts_is_refused(server: Server) -> None:
    answer = server.predict(quote("글"), {"inputs": [TEXT]})
    assert answer.status_code == 400
    assert server.predict(quote("글"), SHORT).status_code == 200
