"""The routes of the gateway's ports, one contract per file."""
