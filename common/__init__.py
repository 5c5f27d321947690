"""What serving, handlers and engine share: errors, logs, memory, which files make a model."""

import os

# From 1.29 on onnxruntime's wheels report to Microsoft what they run, unless this is set before
# they are imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
