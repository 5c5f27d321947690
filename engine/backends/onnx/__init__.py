"""onnxruntime on a GPU."""
