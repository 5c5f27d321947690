"""Reads untrusted model folders: KoGPT2 v1's, Hugging Face's, and LoRA adapters."""
