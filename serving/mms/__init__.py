"""Multi Model Server: its process, its client, and the workers that it starts."""
