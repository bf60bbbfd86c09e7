"""Files to parameters and back: GGUF, Hugging Face folders, the base model."""
