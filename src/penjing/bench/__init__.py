"""Floor 5: training side by side with other trainers, each trial a process of its own, all timed by one meter."""
