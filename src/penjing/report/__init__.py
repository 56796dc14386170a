"""Floor 6: what a run left behind, for a person: one HTML file (`page`) or some lines of terminal (`summary`)."""
