"""Floor 5: reinforcement learning. Sampling answers is a source of batches that asks the model; rewards are a table."""
