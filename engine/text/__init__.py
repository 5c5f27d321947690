"""Text to token ids and back, prompts, and where an answer ends."""
