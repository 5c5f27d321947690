"""Models of tensors: ONNX graphs and MXNet symbol checkpoints, which their own workers hold."""
