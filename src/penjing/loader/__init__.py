"""Floor 2: batches as tensors, and their sources, each with `state()` and `restore()`."""
