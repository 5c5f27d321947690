"""GPT-2 on a CPU: the whole pass in one C library."""
