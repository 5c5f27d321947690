"""Turns an exception of a script into an error for the client; its traceback goes to the log."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Sequence

from common.errors import EngineError
from handlers.user_code.messages import Request, ScriptError, log_ids, out_of_memory

MAX_REASON_CHARACTERS = 300


def to_script_error(error: BaseException, requests: Sequence[Request] = ()) -> EngineError:
    """Convert an exception to an error whose message is its kind and reason in one sentence.

    The log has the traceback, after a line with the ids of `requests`.
    """
    if isinstance(error, EngineError):
        return error
    with contextlib.suppress(Exception):  # the exception's `__str__` may fail
        if requests:
            print(f"request {log_ids(requests)} failed")
        traceback.print_exception(error, file=sys.stdout)
        sys.stdout.flush()
    if isinstance(error, MemoryError):
        return out_of_memory("the model's script ran out of memory")
    if isinstance(error, SystemExit):
        return ScriptError(f"the model's script called sys.exit({error.code!r:.100})")
    # Not of a text that the script parses, such as a client's: its name is "<unknown>".
    if isinstance(error, SyntaxError) and os.path.isfile(error.filename or ""):
        where = f"{os.path.basename(error.filename or '')}, line {error.lineno}"
        return ScriptError(f"the model's script is not Python: {error.msg} ({where})")
    text = ""
    with contextlib.suppress(Exception):
        text = " ".join(str(error).split())[:MAX_REASON_CHARACTERS]
    return ScriptError(
        f"the model's script raised {type(error).__name__}" + (f": {text}" if text else "")
    )
