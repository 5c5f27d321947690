"""Models that bring their own Python: each runs in processes of its own, watched by its worker."""
