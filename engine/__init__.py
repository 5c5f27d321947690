"""The engine: models, batching, sampling and memory, behind `engine.engine.Engine`."""
