"""What the gateway's ports answer, one contract a file."""
