"""Replaces the metrics collector that Multi Model Server runs once a minute; collects nothing.

The program reads its input to the end: otherwise MMS logs ": Stream closed" as an error.
"""

import sys

sys.stdin.buffer.read()
