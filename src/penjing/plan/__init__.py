"""Floor 3: the bill before the run. FLOPs, memory, hardware, time."""
