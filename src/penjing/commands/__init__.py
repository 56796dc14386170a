"""Floor 8: one file for a group of verbs: read arguments, call one function, print."""
