"""Array functions that models and losses share: masks, log-probs, attention."""
