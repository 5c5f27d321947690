"""The process that runs one model's own script: `python child.py <worker's pid> <sockets>`.

Started by `handlers.user_code.process`: loads the script that its worker names, then answers one
batch at a time until the worker ends.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # this file's folder, whose modules would hide the standard library's

import contextlib
import logging
import os
import resource
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from common.errors import EngineError
from common.worker_protocol import MAX_RESPONSE_BYTES
from handlers.user_code import hooks, messages
from handlers.user_code.confinement.rules import become_model_process
from handlers.user_code.conventions.detect import Service, service_of
from handlers.user_code.failures import to_script_error
from handlers.user_code.messages import Answer, Request, ScriptError
from handlers.user_code.module import import_script, set_path
from handlers.user_code.output import print_anything


def main() -> None:
    worker, *descriptors = map(int, sys.argv[1:])
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    connection, engine = (Connection(descriptor) for descriptor in descriptors)
    # A process that the script forks must not keep the connections open after the script's end.
    os.register_at_fork(after_in_child=connection.close)
    os.register_at_fork(after_in_child=engine.close)
    spec, _ = messages.receive(connection)
    become_model_process(worker, spec["confinement"])
    spec["engine"] = engine
    print_anything()
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
    if spec["memory_mib"]:
        limit = spec["memory_mib"] << 20
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    sys.argv = [spec["file"]]
    try:
        service = _load(spec)
    except BaseException as error:  # BaseException, because scripts may raise SystemExit
        row = messages.error_row(to_script_error(error))
        messages.send(connection, {"error": row})
        return
    messages.send(connection, {})
    with contextlib.suppress(EOFError):
        while True:
            message, bodies = messages.receive(connection)
            requests = messages.requests_from(message, bodies)
            answers = _answer(service, requests, message["timeout_s"])
            messages.send_answers(connection, _checked(answers))


def _load(spec: dict[str, Any]) -> Service:
    # Multi Model Server's own workers use the same values.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("MXNET_USE_OPERATOR_TUNING", "0")
    hooks.install()
    os.environ["SM_MODEL_DIR"] = spec["root"]
    set_path(spec["folders"], spec["packages"])
    module = import_script(spec["file"])
    service = service_of(module, spec)
    service.load()
    return service


def _answer(
    service: Service, requests: list[Request], timeout_s: float
) -> Sequence[Answer | EngineError]:
    try:
        return service.answer(requests, timeout_s)
    except BaseException as error:
        return [to_script_error(error, requests)] * len(requests)
    finally:
        sys.stdout.flush()


def _checked(answers: Sequence[Answer | EngineError]) -> list[Answer | EngineError]:
    """Replace an answer above the limit, for which MMS would kill the worker, by an error."""
    limit = MAX_RESPONSE_BYTES // max(len(answers), 1) - 65_536
    return [
        ScriptError(
            f"the answer has {len(answer.body)} bytes, must be at most {limit}"
            f" ({MAX_RESPONSE_BYTES} for the batch)"
        )
        if isinstance(answer, Answer) and len(answer.body) > limit
        else answer
        for answer in answers
    ]


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # does not wait for the script's threads
