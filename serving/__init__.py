"""What the container runs and what the world sees."""
