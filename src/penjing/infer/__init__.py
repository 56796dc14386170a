"""Floor 4: a trained model writes. Prefill and decode over a static cache, many sequences at once."""
