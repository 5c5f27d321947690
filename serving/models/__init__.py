"""The life of each model, and which of them are loaded."""
