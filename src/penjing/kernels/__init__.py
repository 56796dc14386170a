"""Floor 1: operations with several backends. `ops.py` is the only entry point; plain torch is the reference."""

SWITCH = "PENJING_KERNELS"  # environment variable; off: torch's own operations only, for debugging
