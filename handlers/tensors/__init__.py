"""Models of tensors: ONNX graphs and MXNet symbol checkpoints, computed by their own workers."""
