"""What a worker of Multi Model Server runs for one model."""
