"""Models prepared for onnxruntime, kept on the disk."""
