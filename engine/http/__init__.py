"""HTTP on a unix socket: the engine's server and its two clients."""
