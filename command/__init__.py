"""Command-line code of `kogpt2`, `python -m benchmarks` and `python -m tests.chaos`."""
