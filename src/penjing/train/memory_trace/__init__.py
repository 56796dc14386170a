"""The memory of a training step, traced on no device."""
