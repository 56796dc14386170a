"""Floor 7: one file for a group of verbs: read arguments, call one function, print."""
