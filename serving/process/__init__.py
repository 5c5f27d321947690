"""The server's processes: what starts, watches and ends them, and keeps them apart."""
