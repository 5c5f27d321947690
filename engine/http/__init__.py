"""The engine's face: HTTP on a unix socket, its server and its two clients."""
