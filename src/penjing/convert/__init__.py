"""Floor 3: our weights and settings in the forms of other programs, and back. Pure mappings: nothing is run here."""
