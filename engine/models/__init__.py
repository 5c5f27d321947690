"""GPT-2, one file per backend."""
