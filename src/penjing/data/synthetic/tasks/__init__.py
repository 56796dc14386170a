"""Tasks of the synthetic world: drills, games, plots."""
