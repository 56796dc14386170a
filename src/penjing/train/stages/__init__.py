"""One file a stage: its data, source, objective and validation."""
