"""Floor 5: a trained model as other programs want it."""
