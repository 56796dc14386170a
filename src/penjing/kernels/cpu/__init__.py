"""C kernels for CPUs, built by the machine's own compiler when first needed."""
