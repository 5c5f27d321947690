"""The conventions that a model's own script may follow: SageMaker's and Multi Model Server's; where
scripts are found, what they can import, batches, processes. `load_model` with `predict`, and files
whose handler a load names: docs/models/handlers.md, by test_bring_your_own_handlers.py."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests

from tests.e2e.scripts import script, transform
from tests.e2e.server import REPOSITORY, Server, eventually
from tests.e2e.stores import SHORT, error, serving, small, statistics, text
from tests.handlers.tensors.graphs import npy as npy_of

pytestmark = pytest.mark.slow

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server(clean: Server) -> Server:
    small(clean.store / "plain")
    return clean


@pytest.fixture(scope="module")
def store(server: Server) -> Path:
    return server.store


class Model:
    """A model of one test, unloaded after it."""

    def __init__(self, server: Server, name: str) -> None:
        self.server, self.name, self.folder = server, name, server.store / name

    def load(self, source: str = "", path: str = "inference.py", **options: Any) -> None:
        """Load the model with this script, where there is one."""
        if source:
            script(self.folder, source, path)
        answer = self.server.load(self.name, **options)
        assert answer.status_code == 200, answer.text

    def unload(self) -> None:
        self.server.unload(self.name)

    def predict(self, body: Any, **headers: str) -> requests.Response:
        sent = {key.replace("_", "-"): value for key, value in headers.items()}
        return self.server.predict(self.name, body, **sent)


@pytest.fixture
def model(server: Server, request: pytest.FixtureRequest) -> Iterator[Model]:
    found = Model(server, f"m{abs(hash(request.node.nodeid)) % 10**8}")
    yield found
    found.unload()


# SageMaker's functions


def test_the_toolkits_functions_and_its_formats(model: Model) -> None:
    model.load("""
        import numpy as np

        def model_fn(model_dir):
            return np.array([2.0, 3.0])

        def predict_fn(data, model):
            return data * model
        """)
    assert model.predict(b"[[1, 2]]", **JSON).json() == [[2.0, 6.0]]
    for kind in ("application/json; charset=utf-8", "application/json;charset=UTF-8"):
        assert model.predict(b"[1, 2]", Content_Type=kind).json() == [2.0, 6.0]
    csv = model.predict(b"1,2\n3,4", Content_Type="text/csv", Accept="text/csv")
    assert (csv.text, csv.headers["content-type"]) == ("2.0,6.0\n6.0,12.0\n", "text/csv")
    npy = model.predict(
        npy_of([1.0, 1.0]),
        Content_Type="application/x-npy",
        Accept="application/x-npy",
    )
    assert np.load(io.BytesIO(npy.content)).tolist() == [2.0, 3.0]
    assert npy.headers["content-type"] == "application/x-npy"
    # What a client gets wrong is a 4xx.
    assert error(model.predict(b"{", **JSON)) == (400, "InvalidRequest")
    assert error(model.predict(b"\xff", **JSON)) == (400, "InvalidRequest")
    assert error(model.predict(b"a", Content_Type="image/png"))[0] == 415
    assert error(model.predict(b"1", Content_Type="text/csv; charset=what"))[0] == 415
    refused = model.predict(b"[1, 2]", Accept="image/png", **JSON)
    assert error(refused) == (406, "UnsupportedFormatError")
    assert "image/png is not supported" in refused.json()["message"]


def test_npy_is_read_without_pickle_also_by_the_toolkits_own_decoder(model: Model) -> None:
    marker = model.folder.parents[1] / f"{model.name}-ran"

    class Harmful:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(marker),)

    model.load("""
        from sagemaker_inference import decoder
        def input_fn(body, kind): return decoder.decode(body, kind)
        def model_fn(model_dir): return 0
        def predict_fn(data, model): return 1
        """)
    answer = model.predict(npy_of([Harmful()]), Content_Type="application/x-npy")
    assert error(answer)[0] == 500
    assert "pickle" in answer.json()["message"].lower()
    assert not marker.exists()


def test_functions_may_take_the_context_as_one_more(model: Model) -> None:
    model.load("""
        def pre_model_fn(model_dir):
            global before
            before = "pre"

        def model_fn(model_dir, context):
            return [before, context.system_properties["model_dir"] == model_dir]

        def model_warmup_fn(model_dir, model, context=None):
            model.append("warm")

        def transform_fn(model, body, content_type, accept, context):
            properties = context.get_all_request_header(0)
            context.set_response_status(201, "Created", 0)
            context.set_response_header(0, "X-Amzn-SageMaker-Custom-Attributes", "a=1")
            return [*model, properties["X-Amzn-SageMaker-Custom-Attributes"], properties["accept"]]
        """)
    header = {"X-Amzn-SageMaker-Custom-Attributes": "tag"}
    answer = model.server.post(f"/predictions/{model.name}", json=1, headers=header)
    assert answer.status_code == 201
    assert answer.json() == ["pre", True, "warm", "tag", "*/*"]
    assert answer.headers["x-amzn-sagemaker-custom-attributes"] == "a=1"


def test_a_script_around_the_built_in_model(model: Model) -> None:
    """Its handle, in a transform_fn: test_script_isolation.py."""
    small(model.folder)
    assert model.server.load("plain").status_code in (200, 409)
    expected = text(model.server.predict("plain", SHORT))
    source = """
        import json

        def input_fn(body, content_type):
            return {"inputs": json.loads(body)["질문"], "parameters": {"max_new_tokens": 16}}

        def output_fn(prediction, accept):
            return json.dumps({"답": prediction["generated_text"]}), "application/json"
    """
    model.load(source, "code/inference.py", initial_workers=2)
    with ThreadPoolExecutor(4) as pool:
        asked = list(pool.map(lambda _: model.predict({"질문": SHORT["inputs"]}), range(8)))
    assert [answer.json() for answer in asked] == [{"답": expected}] * 8
    # A stream of the engine would go past the script.
    assert model.predict({"질문": SHORT["inputs"], "stream": True}).json() == {"답": expected}
    assert error(model.predict({"질문": ""}))[0] == 400  # the built-in model's own error
    # Without functions the defaults serve, in all forms that the built-in model knows.
    model.unload()
    model.load("import json\n", "code/inference.py")
    assert text(model.predict(SHORT)) == expected
    assert model.predict("나는").json()[:2] == model.server.predict("plain", "나는").json()[:2]
    plain = model.predict("나는".encode(), Content_Type="text/plain")
    assert plain.headers["content-type"] == "text/plain; charset=utf-8"
    model.unload()
    assert statistics(model.server)["models"][0]["name"].startswith("plain")
    assert len(statistics(model.server)["models"]) == 1


# Where scripts are, and what they import


def test_each_model_has_its_own_modules(server: Server, store: Path) -> None:
    for own, word in (("left", "왼쪽"), ("right", "오른쪽")):
        folder = store / own
        transform(
            folder, "return deep.words.WORD + handlers.WORD", top="import deep.words, handlers"
        )
        (folder / "inference.py").rename(folder / "code.py")
        (folder / "code").mkdir()
        (folder / "code.py").rename(folder / "code" / "inference.py")
        script(folder, f"WORD = {word!r}", "code/deep/words.py")
        script(folder, "", "code/deep/__init__.py")
        script(folder, f"WORD = {own!r}", "handlers.py")  # beside the model, called like ours
        script(folder, "raise SystemExit('not Python's own')", "code/json.py")
        script(folder, "raise SystemExit('not the one in code')", "inference.py")
        assert server.load(own).status_code == 200, server.load(own).text
    assert server.predict("left", 1).text == "왼쪽left"
    assert server.predict("right", 1).text == "오른쪽right"
    assert "json.py is never imported: the standard library" in server.text()
    for own in ("left", "right"):
        server.unload(own)
        assert not list((store / own).rglob("__pycache__"))


@pytest.fixture(scope="module")
def other(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose environment names programs, and which installs what models require."""
    environment = {"SAGEMAKER_PROGRAM": "serve.py", "SAGEMAKER_SUBMIT_DIRECTORY": "src"}
    environment |= {"SAGEMAKER_HANDLER": "service:handle", "SAGEMAKER_MODEL_SERVER_WORKERS": "2"}
    environment |= {"ALLOW_MODEL_REQUIREMENTS": "true"}
    with serving(tmp_path_factory.mktemp("other"), store, **environment) as server:
        yield server


def test_the_environment_may_name_the_program(store: Path, other: Server) -> None:
    transform(store / "named", "return 'serve'")
    (store / "named" / "inference.py").rename(store / "named" / "serve.py")
    script(
        store / "submitted",
        "def model_fn(d): 0\ndef transform_fn(m, b, c, a): return 'src'",
        "src/serve.py",
    )
    transform(store / "other", "return 'inference'")
    small(script(store / "empty", "# nothing\n", "code/serve.py"))
    script(store / "handled", FUNCTION.format(name="handled"), "service.py")
    transform(store / "handled", "return 'inference'")
    for own, expected in (("named", "serve"), ("submitted", "src"), ("other", "inference")):
        assert other.load(own, str(store / own)).status_code == 200, own
        assert other.predict(own, 1).text == expected
    offered = other.get("/models?available=true").json()["models"]
    assert {"named", "submitted"} <= {model["modelName"] for model in offered}
    assert len(other.descendants("user_code/child.py")) == 2 * 3
    assert other.load("handled").status_code == 200
    assert other.predict("handled", {"값": 21}).json() == [42, 1]
    for own in ("plain", "empty"):  # bring none: the built-in handler
        assert other.load(own).status_code == 200
    assert text(other.predict("empty", SHORT)) == text(other.predict("plain", SHORT))
    stream = other.predict("empty", {**SHORT, "stream": True})  # of the engine, no script's
    assert stream.headers["content-type"].startswith("text/event-stream")


def wheel(folder: Path) -> None:
    """A package that no index has."""
    with zipfile.ZipFile(folder / "rhymes-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr("rhymes.py", "WORD = '꽃'\n")
        archive.writestr(
            "rhymes-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: rhymes\nVersion: 1.0\n"
        )
        archive.writestr(
            "rhymes-1.0.dist-info/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr("rhymes-1.0.dist-info/RECORD", "")


def test_requirements_are_refused_unless_they_are_allowed(
    server: Server, other: Server, store: Path
) -> None:
    source = "import rhymes\ndef model_fn(d): 0\ndef transform_fn(m, b, c, a): return rhymes.WORD"
    folder = script(store / "packages", source, "code/inference.py")
    wheel(folder / "code")
    (folder / "code" / "requirements.txt").write_text("--no-index\n./rhymes-1.0-py3-none-any.whl\n")
    refused = server.load("packages")
    assert error(refused)[0] == 400
    assert "code/requirements.txt" in refused.json()["message"]
    assert "ALLOW_MODEL_REQUIREMENTS=true" in refused.json()["message"]
    assert other.load("packages").status_code == 200
    assert other.predict("packages", 1).text == "꽃"
    transform(store / "without", "return 'x'", top="import rhymes")
    assert "No module named 'rhymes'" in other.load("without").json()["message"]
    assert list(other.run_dir.rglob("rhymes.py"))
    assert other.unload("packages").status_code == 200
    assert not list(other.run_dir.rglob("rhymes.py"))
    (folder / "code" / "requirements.txt").write_text("--no-index\nno-such-package==1\n")
    failed = other.load("packages")
    assert error(failed)[0] == 400
    assert "no-such-package" in failed.json()["message"]
    done = subprocess.run([sys.executable, "-c", "import rhymes"], capture_output=True, check=False)
    assert done.returncode != 0


# Multi Model Server's services

FUNCTION = """
    class Model:
        def __init__(self):
            self.initialized = False

        def initialize(self, context):
            assert context.system_properties["model_dir"].endswith({name!r})
            self.batch_size = context.system_properties["batch_size"]
            self.initialized = True

        def preprocess(self, data):
            return [row["body"]["값"] for row in data]

        def inference(self, values):
            return [[value * 2, len(values)] for value in values]

        def postprocess(self, values):
            return values

        def handle(self, data, context):
            context.metrics.add_counter("requests", len(data))
            return self.postprocess(self.inference(self.preprocess(data)))

    _service = Model()

    def handle(data, context):
        if not _service.initialized:
            _service.initialize(context)
        if data is None:
            return None
        return _service.handle(data, context)
"""


@pytest.mark.parametrize(
    ("form", "handler"),
    [("default", "service:Service"), ("tgz", "service.py"), ("no-archive", "service")],
)
def test_archives_of_the_model_archiver_and_their_handlers(
    model: Model, tmp_path: Path, form: str, handler: str
) -> None:
    source = """
        class Service:
            def initialize(self, context):
                self.manifest = context.manifest

            def handle(self, data, context):
                kind = context.get_request_header(0, "Content-Type")
                context.set_response_content_type(0, "text/plain")
                return [f"{self.manifest['model']['modelName']} {kind} {data[0]['body']}"]
    """
    command = [str(Path(sys.executable).with_name("model-archiver")), "--model-name", model.name]
    command += ["--model-path", str(script(tmp_path / "model", source, "service.py"))]
    command += ["--handler", handler, "--export-path", str(model.server.store)]
    command += ["--archive-format", form, "--runtime", "python3"]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    model.load()
    answer = model.predict("봄".encode(), Content_Type="text/plain; charset=utf-8")
    assert answer.content.decode() == f"{model.name} text/plain; charset=utf-8 봄"
    assert answer.headers["content-type"] == "text/plain"
    bad = model.predict(b"{", **JSON)
    assert error(bad)[0] == 400
    assert "body is not JSON" in bad.json()["message"]


def test_a_class_of_three_steps_gets_values_as_multi_model_server_gives_them(model: Model) -> None:
    model.load("""
        class Base:
            def initialize(self, context):
                self.kinds = bytes, bytearray

            def preprocess(self, data):
                return data

            def postprocess(self, values):
                return values

        class Shows(Base):
            def inference(self, rows):
                shown = {}
                for key, value in rows[0].items():
                    raw = isinstance(value, self.kinds)
                    shown[key] = ["bytes", value.decode()] if raw else value
                return [shown]
        """)
    server, path = model.server, f"/predictions/{model.name}"
    plain = server.post(path, data='{"값": 1}'.encode())  # without a Content-Type
    assert plain.json() == {"body": ["bytes", '{"값": 1}']}
    asked = server.get(path, params={"data": "봄 밤&", "n": ["1", "2"]})
    given = {"data": ["bytes", "봄 밤&"], "n": ["bytes", "2"], "body": None}
    assert asked.json() | {"body": None} == given
    both = server.post(path, params={"data": "[1]"}, json={"값": 1})
    assert both.json() == {"data": ["bytes", "[1]"], "body": {"값": 1}}
    odd = server.get(f"{path}?data=%ed%a0%80&accept=a&%ff=1&;=&body")
    assert odd.status_code == 200, odd.text
    long = server.get(path, params={"data": "가" * 400})
    assert error(long) == (400, "BadRequestException")
    assert "send it as the body" in long.json()["message"]


def test_a_load_request_may_name_the_handler(model: Model) -> None:
    script(model.folder, FUNCTION.format(name=model.name), "src/service.py")
    script(model.folder, "raise SystemExit")
    for wrong, reason in (
        ("nothing:handle", "no file nothing"),
        ("src/service:nothing", "is not in service.py"),
        ("../service:handle", "handler is"),
        ("service;handle", "handler is"),
    ):
        refused = model.server.load(model.name, handler=wrong)
        assert error(refused)[0] == 400
        assert reason in refused.json()["message"]
    model.load(handler="src/service.py:handle")
    assert model.predict({"값": 2}).json() == [4, 1]


SERVICE_ERRORS = """
    from mms.service import PredictionException

    class Service:
        def initialize(self, context):
            self.answers = ["text", [1, 2], [None]]

        def handle(self, data, context):
            if data[0]["body"] == "wrong":
                raise PredictionException("값이 없습니다", 422)
            return self.answers[data[0]["body"]]
"""


def test_a_services_errors_have_their_status_and_reason(model: Model) -> None:
    """Those of the toolkit's functions: handlers/test_handler_service.py."""
    model.load(SERVICE_ERRORS)
    for body, status, kind, reason in (
        ("wrong", 422, "PredictionException", "값이 없습니다"),
        (0, 500, "ScriptError", "handle returned a str, must return a list"),
        (1, 500, "ScriptError", "2 answers, must return one for each request (1)"),
        (2, 500, "ScriptError", "returned nothing (None)"),
    ):
        answer = model.predict(body)
        assert error(answer) == (status, kind)
        assert reason in answer.json()["message"]


# Archives of Multi Model Server: what they are called, and which handler they have

GUIDE = (REPOSITORY / "docs" / "models" / "handlers.md").read_text("utf-8")
SERVICE = GUIDE.partition("# service.py\n")[2].partition("```")[0]


def mar(path: Path, **manifest: Any) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("service.py", SERVICE)
        if manifest:
            archive.writestr("MAR-INF/MANIFEST.json", json.dumps({"model": manifest}))


@pytest.fixture
def mars(server: Server) -> Iterator[Server]:
    for name in server.loaded():
        assert server.unload(name).status_code == 200
    script(server.store / "counter", SERVICE, "service.py")
    mar(server.store / "file.mar", modelName="셈", handler="service:handle")
    mar(server.store / "odd.mar", modelName="../x", handler="service:handle")
    mar(server.store / "nameless.mar", handler="service:handle")
    mar(server.store / "bare.mar")
    yield server
    for name in server.loaded():
        assert server.unload(name).status_code == 200


def load(server: Server, **body: Any) -> requests.Response:
    return server.post("/models", json=body)


def count(server: Server, name: str) -> Any:
    return server.predict(name, {"text": "진달래꽃"}).json()


def test_an_archive_is_called_what_its_manifest_says(mars: Server) -> None:
    assert load(mars, url="file.mar").status_code == 200
    assert mars.loaded() == ["셈"]
    assert count(mars, "셈") == {"characters": 4}
    assert load(mars, url="file").status_code == 409
    assert load(mars, url="file.mar", model_name="other").status_code == 200
    answer = load(mars, url="odd.mar")
    assert error(answer)[0] == 400
    assert "'../x' is no model name" in answer.json()["message"]
    assert load(mars, url="odd.mar", model_name="odd").status_code == 200
    assert load(mars, url="nameless.mar").status_code == 200  # as its file
    assert mars.loaded() == ["nameless", "odd", "other", "셈"]


# Batches and processes


def test_batches_keep_each_requests_own_headers_and_errors(model: Model) -> None:
    model.load(
        """
        import time

        def handle(data, context):
            if data is None:
                return
            time.sleep(0.3)
            if any(row["body"] >= 100 for row in data):
                raise ValueError("묶음")
            answers = []
            for i, row in enumerate(data):
                context.set_response_content_type(i, context.get_request_header(i, "Accept"))
                if row["body"] % 5 == 0:
                    context.set_response_status(418, "teapot", i)
                answers.append([row["body"], len(data)] if row["body"] % 7 else None)
            return answers
        """,
        batch_size=4,
        max_batch_delay=500,
    )

    def ask(i: int) -> tuple[int, Any, str]:
        body = b"{" if i == 3 else str(i).encode()
        answer = model.predict(body, Accept=f"application/x-{i}", **JSON)
        content = answer.json() if answer.content else None
        return answer.status_code, content, answer.headers["content-type"]

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
        failed = list(pool.map(model.predict, range(100, 108)))
    for i, (status, content, kind) in enumerate(answers):
        if i == 3:
            assert status == 400
        elif i % 7 == 0:
            assert (status, content["type"]) == (500, "ScriptError")
        else:
            assert status == (418 if i % 5 == 0 else 200)
            assert content[0] == i
            assert kind == f"application/x-{i}"
    assert max(content[1] for status, content, _ in answers if status == 200) > 1
    assert {error(answer) for answer in failed} == {(500, "ScriptError")}
    assert {a.json()["message"] for a in failed} == {"the model's script raised ValueError: 묶음"}


def test_a_script_has_one_process_unless_more_are_asked_for(model: Model) -> None:
    top = "import os, time"
    transform(model.folder, "time.sleep(0.2)\nreturn str(os.getpid())", top=top)
    model.load()

    def pids() -> set[str]:
        with ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(model.predict, range(12)))
        assert {answer.status_code for answer in answers} == {200}
        return {answer.text for answer in answers}

    def scale(**query: int) -> int:
        path = f"/models/{model.name}"
        return model.server.put(path, params=query, management=True).status_code

    assert len(pids()) == 1
    assert scale(min_worker=3, max_worker=3) == 200
    eventually(lambda: len(pids()) == 3)
    assert scale(min_worker=1) == 200
    eventually(lambda: len(pids()) == 1)
    model.unload()
    eventually(lambda: not model.server.descendants(f"{model.folder}"))
    model.load(initial_workers=2)  # which waits for both
    workers = model.server.get(f"/models/{model.name}").json()["workers"]
    assert [worker["status"] for worker in workers] == ["READY"] * 2
    assert len(pids()) == 2


def test_scaling_waits_for_running_calls_and_repeats_none(model: Model) -> None:
    transform(
        model.folder, "print('봄비', flush=True)\ntime.sleep(1)\nreturn '시'", top="import time"
    )
    model.load(initial_workers=4)
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(model.predict, number) for number in range(4)]
        eventually(lambda: model.server.text().count("봄비") == 4)
        scaled = model.server.put(f"/models/{model.name}?min_worker=1", management=True)
        assert scaled.status_code == 200
        assert {call.result().status_code for call in calls} == {200}
    assert model.server.text().count("봄비") == 4
