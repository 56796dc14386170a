"""C kernels for CPUs, built by the machine's compiler on first use."""
