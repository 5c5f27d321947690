"""What a model's script may define, and what stands in for what it leaves out."""
