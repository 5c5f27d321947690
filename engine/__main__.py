"""`python -m engine`: the engine's process, which holds all models."""

from __future__ import annotations

import os
import sys

from common.errors import ServiceError
from common.logs import log_as_json
from common.open_files import raise_open_files_limit
from common.parent_death import end_with_server
from common.settings import read_settings

# How long the HTTP thread waits for the interpreter's lock, which the step loop holds. Longer:
# tokens are sent later. Shorter: steps are interrupted more often.
SWITCH_INTERVAL_S = 0.0002


def main() -> int:
    end_with_server()
    log_as_json("engine")
    raise_open_files_limit()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        # Here, as without its library these raise `EngineError`.
        from engine.backends import import_backend
        from engine.http.listener import serve
        from engine.settings import Settings

        settings = read_settings(Settings)
        if settings.device == "cpu":
            # MXNet then runs operators on the calling thread, which saves 0.2 ms a step.
            os.environ.setdefault("MXNET_ENGINE_TYPE", "NaiveEngine")
        import_backend(settings.backend, settings.device)
        serve(settings)
    except ServiceError as error:
        print(error.message, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
