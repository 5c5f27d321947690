"""MXNet, on a CPU or a GPU: the reference for exactness."""
