"""onnxruntime, on a CPU or a GPU: the fast one."""
