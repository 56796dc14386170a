"""Floor 6: a trained model as other programs want it."""
