"""Floor 0: errors, configuration, registries, seeds, units and files. Imports nothing else of penjing."""
