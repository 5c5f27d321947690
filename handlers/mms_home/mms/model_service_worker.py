"""What Multi Model Server starts for each model (`$MODEL_SERVER_HOME/mms/model_service_worker.py`).

Only a doorway to `handlers.worker`: its folder leaves the path, so that `mms` stays the package.
"""

import sys

del sys.path[0]

from handlers.worker import main  # noqa: E402

main()
