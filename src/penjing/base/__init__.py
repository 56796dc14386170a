"""Floor 0: errors, configuration, tables, seeds, units and files. Imports nothing of this package."""
