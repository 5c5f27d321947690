"""How many cases each property test tries: EXAMPLES says it, for a long look at one of them."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("tests", max_examples=int(os.environ.get("EXAMPLES", "200")))
settings.load_profile("tests")
