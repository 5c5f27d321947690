"""Models with their own Python code, which runs in confined child processes of the worker."""
