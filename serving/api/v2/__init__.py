"""The Open Inference Protocol (V2) and Triton's extensions of it."""
