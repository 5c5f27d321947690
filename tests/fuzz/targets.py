"""Every parser of foreign bytes, as a function of those bytes.

A target returns for valid input and raises a `ServiceError` for invalid input; any other error, and
memory beyond a small multiple of the input, is a defect.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qsl

import numpy as np

from common.errors import ServiceError
from common.fields import MAX_STOP_CHARACTERS
from common.json_body import read_json
from common.media_types import BINARY, HEADER_SIZE, accepted, media_type
from common.model_files import MANIFEST
from engine.artifacts.open import open_artifact
from engine.artifacts.read_params import index_params
from engine.artifacts.read_safetensors import index_safetensors
from engine.artifacts.read_torch import index_torch
from engine.artifacts.tensor_index import Index, map_index
from engine.prepared.manifest import from_manifest, read
from engine.text.answer_text import AnswerText
from engine.text.chat_template import ChatTemplate
from handlers import payload
from handlers.tensors import tensor_model, v2
from handlers.tensors.codec import CSV, NPY, Array, TensorSpec
from handlers.text import classifier
from handlers.text import v2 as text_v2
from handlers.user_code import messages, requirements
from handlers.user_code.entry_point import find_script, manifest_name
from scripts.client.answers import read as read_answer
from scripts.client.errors import CallFailed
from scripts.client.targets import EVENTS, LINES, Answer
from serving.api import tgi
from serving.api.openai import parsing, responses
from serving.api.v2.generate import parse as parse_generate
from serving.errors import BadRequest
from serving.models.model_settings import FILE, ModelSettings
from serving.names import is_clean, model_name
from serving.store.archive import extract
from serving.store.archive_limits import MAX_DEPTH
from serving.store.sources import Sources, open_store
from tests.bounded import bounded
from tests.engine.hugging_face import make_hugging_face
from tests.engine.models import make_artifact
from tests.fuzz import deltas, forms
from tests.fuzz.tokenizers import NAMES as TOKENIZERS
from tests.fuzz.tokenizers import Tokenizer

LIMIT = 100_000  # of bodies
FREE_BYTES = 8 << 20
SIZE = 4  # of the first bytes, the length of a binary request's JSON

MESSAGES = [{"role": "system", "content": "시"}, {"role": "user", "content": "나 보기가"}]
PIECES = (
    *("{% for m in messages %}", "{% endfor %}", "{% if m %}", "{% else %}", "{% endif %}"),
    *("{{ m.content }}", "{{ m['role'] }}", "{{ eos_token }}", "{{ bos_token }}", "가", "\ud800"),
    *("{% set x = messages %}", "{% set ns = namespace(a=x) %}", "{% set ns.a = ns %}", "{{ ns }}"),
    *("{{ x | tojson }}", "{{ x[0] | items | list }}", "{{ x.__class__.__mro__ }}", "{% break %}"),
    *("{{ ''.format.__globals__ }}", "{{ '%c' % 55296 }}", "{{ raise_exception('안 돼') }}"),
    *("{{ x.append(1) }}", "{{ strftime_now('%Y') }}", "{% generation %}", "{% endgeneration %}"),
    *("{% macro f() %}", "{% endmacro %}", "{{ f() }}", "{% include 'a' %}", "{{ cycler }}"),
    *("{{ messages | map(attribute='__class__') | list }}", "{{ 1/0 }}", "{#", "#}", "{{", "}}"),
)

ENDS = contextlib.ExitStack()
atexit.register(ENDS.close)

Target = Callable[[bytes], object]


def attempt(target: Target, data: bytes, measured: bool = True) -> bool:
    """Whether the input is taken; a refusal can be encoded. Measuring memory is slow."""
    with bounded(len(data), FREE_BYTES) if measured else contextlib.nullcontext():
        try:
            target(data)
            status = 200
        except ServiceError as error:
            error.message.encode("utf-8")
            status = error.status
    assert status < 500 or status == 507
    return status == 200


class Echo:
    """A model of tensors whose outputs are its inputs."""

    def __init__(self, *datatypes: str, shape: tuple[str | None, ...] = ("n", None)) -> None:
        specs = [TensorSpec(f"x{i}", kind, shape) for i, kind in enumerate(datatypes)]
        self.metadata = v2.Metadata("되풀이", "test", specs, specs)

    def run(
        self, inputs: Mapping[str, Array], outputs: Sequence[str], timeout_s: float
    ) -> dict[str, Array]:
        return {name: inputs[name] for name in outputs}


FLOATS, TEXTS, SEVERAL = Echo("FP32"), Echo("BYTES"), Echo("INT64", "BOOL", "UINT8", "FP64")
ROWS = Echo("BYTES", shape=("n",))


def tensors(kind: str, *models: Echo) -> Target:
    def target(data: bytes) -> None:
        for model in models:
            with contextlib.suppress(ServiceError):
                tensor_model.transform_fn(model, data, kind, CSV, 60)
        tensor_model.transform_fn(models[0], data, kind, "*/*", 60)

    return target


def binary_tensors(data: bytes) -> None:
    """A request of tensors in binary."""
    size, body = data[:SIZE].decode("latin-1").strip(), data[SIZE:]
    kind = f"{BINARY};{HEADER_SIZE}={size}"
    for model in (SEVERAL, TEXTS, FLOATS):
        with contextlib.suppress(ServiceError):
            tensor_model.transform_fn(model, body, kind, None, 60)
    text_v2.parse(body, kind)


def text_request(data: bytes) -> None:
    found = text_v2.parse(data, "application/json")
    request = payload.parse(data, "application/json") if found is None else found[1]
    answer = {"completions": [{"text": "가", "tokens": 1, "finish_reason": "stop"}], "seconds": 0}
    payload.format_answer(request, answer, "application/json")
    if found is not None:
        text_v2.answer(found[0], payload.sequences_of(request, answer), "시")


class Labeled:
    """Stands in for a `ModelHandle` of a classifier; tokens are the characters of a text."""

    def __init__(self, *, of_tokens: bool) -> None:
        about = {"labels": ["O", "B-가"], "function": "softmax", "of_tokens": of_tokens}
        self.model = {"name": "시", "classifier": about}
        self._of_tokens = of_tokens

    def classify(self, texts: Any, *_: Any, **options: Any) -> dict[str, Any]:
        results = []
        for text, *_pair in texts:
            places = range(len(text) if self._of_tokens else 1)
            logits = [[float(i % 2), 0.5] for i in places]
            tokens = {"begins": list(places), "ends": [i + 1 for i in places]}
            results.append({"logits": logits, "special": [0 for _ in places], **tokens})
        return {"results": results, "prompt_tokens": len(texts)}


def classified(kind: str) -> Callable[[bytes], object]:
    """Requests to classifiers of texts and of tokens."""

    def run(data: bytes) -> None:
        for of_tokens in (False, True):
            with contextlib.suppress(ServiceError):
                classifier.answer(cast(Any, Labeled(of_tokens=of_tokens)), data, kind, None, 60)

    return run


def types(data: bytes) -> None:
    header = data.decode("latin-1")
    with contextlib.suppress(ServiceError):
        payload.parse(b'"a"', header)
    media_type(header)
    accepted(header, ("application/json", "text/plain"))


def json_object(data: bytes) -> dict[str, object]:
    value = read_json(data)
    if not isinstance(value, dict):
        raise BadRequest("no object")
    return value


def openai(data: bytes) -> None:
    body = json_object(data)
    for parse in (parsing.completion, responses.parse):
        with contextlib.suppress(ServiceError):
            parse(body)
    parsing.chat(body)


def tgi_body(data: bytes) -> None:
    body = json_object(data)
    if tgi.is_meant(body, tgi.CLIENT):
        tgi.parse(body)


def model_settings(data: bytes) -> None:
    """The settings of a load: its body, its query, and the file beside a model."""
    with contextlib.suppress(ServiceError):
        ModelSettings.parse(dict(parse_qsl(data.decode("utf-8", "replace"))))
    ModelSettings.parse(json_object(data))


def names(data: bytes) -> None:
    name = data.decode("utf-8", "surrogateescape")
    found = model_name(name)
    assert is_clean(found)
    assert model_name(found) == found


def url(data: bytes) -> None:
    """Locate a model by any url: only those in the store are found, and no host gets a request."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "store"
        root.mkdir()
        for name in ("시.tar.gz", "../secret.tar.gz"):
            (root / name).write_bytes(b"x")
        sources = Sources(open_store(str(root)))
        address = data.decode("utf-8", "replace").replace("ROOT", str(root))
        try:
            found = sources.locate(address)
        except OSError as error:  # a name that the file system cannot have
            raise BadRequest(str(error)) from None
        assert (root / found.url).resolve().is_relative_to(root)


def template(data: bytes) -> None:
    """A chat template of a piece for each byte."""
    source = "".join(PIECES[byte % len(PIECES)] for byte in data[:40])
    ChatTemplate(source, "chat_template.jinja", {"eos_token": "</s>"}).render(MESSAGES)


def stops(data: bytes) -> None:
    """Stop and strip texts: the streamed pieces are those of the whole text."""
    value = read_json(data)
    if not isinstance(value, dict) or not all(isinstance(v, list) for v in value.values()):
        raise BadRequest("no lists")
    pieces, stop, strip = (
        [v[:most] for v in value.get(name, ())[:16] if isinstance(v, str) and v]
        for name, most in (("pieces", 300), ("stop", MAX_STOP_CHARACTERS), ("strip", 64))
    )

    class Pieces:
        def feed(self, token: int) -> str:
            return pieces[token]

        def flush(self) -> str:
            return ""

    def streamed(ends: list[str]) -> str:
        answer, text = AnswerText(Pieces(), tuple(stop), tuple(ends)), ""
        for token in range(len(pieces)):
            piece, ended = answer.write(token)
            text += piece
            if ended:
                return text
        return text + answer.write(0, "stop")[0]

    whole = "".join(pieces)
    cuts = [at for s in stop if (at := whole.find(s)) >= 0]
    if not cuts:
        assert streamed([]) == whole
    assert streamed([]) in whole
    assert streamed(strip) in streamed([])


def in_file(name: str, index_file: Callable[[Path], Index]) -> Target:
    def target(data: bytes) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / name
            path.write_bytes(data)
            for array in map_index(path.parent, index_file(path)).values():
                assert len(np.asarray(array).tobytes()) <= len(data)

    return target


@cache
def model(kind: str) -> Path:
    """A small model, there until this process ends."""
    folder = Path(ENDS.enter_context(tempfile.TemporaryDirectory()))
    if kind == "config.json":
        return make_hugging_face(folder / kind, layers=1, units=16, vocab=440, max_length=8)
    return make_artifact(folder / kind, layers=1, units=16, heads=2, vocab=200, max_length=8)


def in_artifact(name: str) -> Target:
    """A target for one file of a model's folder."""

    def target(data: bytes) -> None:
        (model(name) / name).write_bytes(data)
        open_artifact(model(name))
        from_manifest(model(name), json.loads(json.dumps(read(str(model(name))))))

    return target


def manifest(data: bytes) -> None:
    """The manifest of a `.mar`, and the settings beside a model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / MANIFEST
        path.parent.mkdir()
        path.write_bytes(data)
        (Path(folder) / FILE).write_bytes(data)
        (Path(folder) / "service.py").write_text("def handle(data, context): ...")
        with contextlib.suppress(ServiceError):
            ModelSettings.read(Path(folder))
        manifest_name(folder)
        find_script(folder)


def archive(data: bytes) -> None:
    """Also of a refused one, what is there is plain files within the bounds."""
    sizes, refusal = [0], ""
    with tempfile.TemporaryDirectory(prefix="archive-") as folder:
        place = Path(folder) / "m"
        place.mkdir()
        try:
            extract(io.BytesIO(data), place, "모델.tar.gz", LIMIT, sizes.append)
        except ServiceError as error:
            refusal = error.message
            raise
        finally:
            assert folder not in refusal
            assert min(sizes) >= 0
            assert sum(sizes) <= LIMIT
            assert os.listdir(folder) == ["m"]
            within_bounds(place)


def within_bounds(folder: Path) -> None:
    size = 0
    for parent, folders, names in os.walk(folder):
        assert not any(name.startswith(".") or "\\" in name for name in (*folders, *names))
        assert len(Path(parent).relative_to(folder).parts) < MAX_DEPTH
        for name in names:
            found = os.lstat(os.path.join(parent, name))
            assert stat.S_ISREG(found.st_mode)
            size += found.st_size // found.st_nlink
    assert size <= LIMIT


def answers(data: bytes) -> None:
    """Of servers, as the commands read them; the first byte chooses among whole and streamed."""
    kinds, body = ("application/json", EVENTS, LINES[0]), data[1:]
    cut = (body[at : at + 7] for at in range(0, len(body), 7))  # letters are cut in half
    try:
        completion = read_answer(Answer(kinds[sum(data[:1]) % len(kinds)], cut))
    except CallFailed as error:
        raise BadRequest(str(error)) from None
    for text in (completion.text, *completion.others.values()):
        text.encode("utf-8")


def grpc_infer(data: bytes) -> None:
    from google.protobuf.message import DecodeError

    from serving.api.grpc.convert import from_http, one_text, to_http
    from serving.api.grpc.messages import message

    try:
        request = message("inference.ModelInferRequest").FromString(data)
    except DecodeError:
        raise BadRequest("gRPC says so itself") from None
    with contextlib.suppress(ServiceError):
        one_text(request)
    body, headers = to_http(request)
    length = next(iter(headers.values()), None)
    kind = f"{BINARY};{HEADER_SIZE}={length}" if length else "application/json"
    for model in (SEVERAL, TEXTS, FLOATS):
        with contextlib.suppress(ServiceError):
            answer, kind = tensor_model.transform_fn(model, body, kind, "*/*", 60)
            from_http(answer, kind.partition(f";{HEADER_SIZE}=")[2] or None)


def script_messages(data: bytes) -> None:
    """What a script's process sends, after its load or as an answer.

    The input is the JSON of a message, and a body behind each zero byte.
    """
    ours, theirs = Pipe()
    with ours:
        with theirs:
            os.set_blocking(theirs.fileno(), False)
            with contextlib.suppress(BlockingIOError):
                for part in data.split(b"\0"):
                    theirs.send_bytes(part)
        try:
            message, bodies = messages.receive_from_script(ours)
            found = messages.answers_from(message, bodies) if "answers" in message else []
            if "error" in message:
                found.append(messages.error_from(message["error"]))
        except (EOFError, OSError, ValueError) as error:
            raise BadRequest(repr(error)) from None
    for answer in found:
        if isinstance(answer, messages.Answer):
            names = {name.lower() for name in answer.headers}
            assert names.isdisjoint(messages.CONNECTION_HEADERS)
            json.dumps([answer.content_type, answer.status, answer.headers]).encode("ascii")
        else:
            assert 400 <= answer.status <= 599
            f"{answer.type} {answer.message}".encode()
            assert 0 <= (answer.retry_after_s or 0) <= messages.MAX_RETRY_AFTER_S


def pip_output(data: bytes) -> None:
    lines, reason = requirements.failure(data)
    assert len(lines) <= requirements.MAX_LOG_LINES
    for line in (*lines, reason):
        line.encode()
        assert line.splitlines() == [line]


TARGETS: dict[str, Target] = {
    "answers": answers,
    "archive": archive,
    "classifier": classified("application/json"),
    "classifier-csv": classified(CSV),
    "config.json": in_artifact("config.json"),
    "delta": deltas.target,
    "form": forms.target,
    "csv": tensors(CSV, FLOATS, TEXTS),
    "generate": lambda data: parse_generate(json_object(data), stream=b"\x01" in data),
    "generation.json": in_artifact("generation.json"),
    "grpc": grpc_infer,
    "json": tensors("application/json", FLOATS, SEVERAL, TEXTS, ROWS),
    "manifest": manifest,
    "names": names,
    "npy": tensors(NPY, FLOATS, Echo("BOOL"), Echo("INT64")),
    "openai": openai,
    "pip": pip_output,
    "params": in_file("any.params", index_params),
    "safetensors": in_file("any.safetensors", index_safetensors),
    "script": script_messages,
    "settings": model_settings,
    "stops": stops,
    "template": template,
    "text": lambda data: payload.parse(data, "text/plain"),
    "text-json": text_request,
    "tgi": tgi_body,
    "torch": in_file("any.bin", index_torch),
    "types": types,
    "url": url,
    "v2-binary": binary_tensors,
    **{name: Tokenizer(name) for name in TOKENIZERS},
}
