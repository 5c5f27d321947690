"""Multi Model Server runs this once a minute for metrics that are not used here.

It reads what Java writes to it: to a process that has ended by then, Java logs ": Stream closed" as
an error.
"""

import sys

sys.stdin.buffer.read()
