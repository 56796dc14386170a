"""Floor 1: operations with several backends. `ops.py` is the only entry point; plain torch is the reference."""

SWITCH = "PENJING_KERNELS"  # environment variable; off: torch's own operations only, for debugging

# The last row that has an op and supports its tensors computes it (select.py).
BACKENDS = {
    "torch": "penjing.kernels.reference",
    "torch, in chunks": "penjing.kernels.autograd_functions",
    "torch, in tiles": "penjing.kernels.tiled_attention",
    "torch, by lengths": "penjing.kernels.varlen_attention",
    "C": "penjing.kernels.cpu.ops",
    "C, in tiles": "penjing.kernels.cpu.attention",
    "Triton": "penjing.kernels.triton.ops",
}
