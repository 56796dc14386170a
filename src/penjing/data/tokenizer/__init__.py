"""Training, loading and checking tokenizers."""
