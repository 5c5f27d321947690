"""The workers of Multi Model Server: handlers for texts, tensors and models' own scripts."""
