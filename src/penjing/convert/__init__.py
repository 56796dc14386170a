"""Floor 3: convert weights and configs to and from the formats of other programs. Pure mappings; no model is run."""
