"""Models of texts: the built-in handler, whose tokens the engine makes."""
