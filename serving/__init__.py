"""The server: its processes, its HTTP and gRPC contracts, and the life of models."""
