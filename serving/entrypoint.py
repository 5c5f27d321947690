"""The container's entrypoint: `serve` runs the server, another command is executed unchanged.

python -m serving.entrypoint [serve [--port N] [--management-port N] [--host A] [--model-store D]]
python -m serving.entrypoint bash -c 'ls /opt/ml'
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from serving.process.signals import StopSignals, unblock


def main(arguments: Sequence[str] | None = None) -> int:
    command = list(sys.argv[1:] if arguments is None else arguments) or ["serve"]
    if command[0] != "serve":
        unblock()
        try:
            os.execvp(command[0], command)  # noqa: S606
        except OSError as error:
            print(f"{command[0]} cannot be run: {error.strerror}", file=sys.stderr)
            return 127
    signals = StopSignals()
    from serving import server  # imported now: it takes 0.3 s, in which a signal may come

    return server.main(command[1:], signals)


if __name__ == "__main__":
    sys.exit(main())
