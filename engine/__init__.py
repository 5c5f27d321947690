"""What makes tokens: models, batching, sampling and memory, behind `engine.registry.Engine`."""
