"""Collects no metrics, in place of Multi Model Server's collector, which it runs once a minute.

Reads its input to the end: otherwise MMS logs ": Stream closed" as an error.
"""

import sys

sys.stdin.buffer.read()
