"""What people are told of an exception that a script let out; its traceback goes to the log."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback

from common.errors import EngineError
from handlers.user_code.messages import ScriptError, out_of_memory

MAX_REASON = 300


def explained(error: BaseException) -> EngineError:
    """The exception as an error with a reason, in one sentence."""
    if isinstance(error, EngineError):
        return error
    with contextlib.suppress(Exception):  # of an exception that cannot say what it is
        traceback.print_exception(error, file=sys.stdout)
        sys.stdout.flush()
    what = "the model's script"
    if isinstance(error, MemoryError):
        return out_of_memory(f"{what} ran out of memory")
    if isinstance(error, SystemExit):
        return ScriptError(f"{what} called sys.exit({error.code!r:.100})")
    if isinstance(error, SyntaxError):
        where = f"{os.path.basename(error.filename or '')}, line {error.lineno}"
        return ScriptError(f"{what} is not Python: {error.msg} ({where})")
    text = ""
    with contextlib.suppress(Exception):
        text = " ".join(str(error).split())[:MAX_REASON]
    return ScriptError(f"{what} raised {type(error).__name__}" + (f": {text}" if text else ""))
