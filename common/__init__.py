"""Code that serving, handlers and engine share: errors, logs, memory, recognition of models."""

import os

# Wheels of onnxruntime since 1.29 send telemetry to Microsoft unless this is set before they are
# imported.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
