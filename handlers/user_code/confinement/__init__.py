"""What a model's own program may see and do."""
