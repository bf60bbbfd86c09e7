"""rlpost: post-training of language models in JAX."""
