"""Models' folders, as foreign as they come: KoGPT2 v1's and Hugging Face's."""
