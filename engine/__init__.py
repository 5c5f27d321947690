"""What makes tokens: models, batching, sampling and memory, behind `engine.engine.Engine`."""
