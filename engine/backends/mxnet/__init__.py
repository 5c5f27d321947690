"""MXNet on a GPU."""
