"""Text models: the built-in handler, which has the engine generate the tokens."""
