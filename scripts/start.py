"""Starts the command `kogpt2`, whose modules take a third of a second to import."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run `scripts.cli`. Ctrl-C during the imports ends the process without a traceback."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from scripts import cli

    signal.signal(signal.SIGINT, handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
