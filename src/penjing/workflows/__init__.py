"""What the commands do: train, answer a file, sweep, serve, check, and the quickstart of all of it."""
