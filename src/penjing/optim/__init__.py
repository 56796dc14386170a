"""Floor 3: optimizers, their parameter groups, and learning-rate schedules. `Run` names them (train/config.py)."""
