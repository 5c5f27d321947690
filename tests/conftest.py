from __future__ import annotations

import sys

# What pytest makes of the tests' modules is kept, also where PYTHONDONTWRITEBYTECODE is set: to
# rewrite their asserts takes half of the collection, in each worker. Programs that tests start keep
# none still.
sys.dont_write_bytecode = False
