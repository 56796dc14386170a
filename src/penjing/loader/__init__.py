"""Floor 2: batches. The first tensors; every source has `state()` and `restore()`."""
