"""Floor 5: the one loop, its meter, and what puts the parts together."""
