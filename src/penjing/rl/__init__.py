"""Floor 6: reinforcement learning. `RolloutSource` samples the batches; rewards are in a registry."""
