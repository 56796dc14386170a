"""Floor 4: the one loop, its meter, and what puts the parts together."""
