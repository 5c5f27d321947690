#!/usr/bin/env python
"""The container's entrypoint: `serve` by default, any other command line as it is given."""

import sys

from serving.entrypoint import main

sys.exit(main())
