"""The built-in handler for text models, which requests their tokens from the engine."""
