"""Text to packed arrays: tokenizer, chat template, plan, pipeline."""
