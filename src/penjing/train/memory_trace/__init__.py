"""The memory of a training step, traced without a device."""
