"""Floor 1: operations with more than one implementation. `ops.py` is their one front; plain torch is the reference."""

SWITCH = "PENJING_KERNELS"  # environment variable; off: torch's own operations only, to find out what causes a fault
