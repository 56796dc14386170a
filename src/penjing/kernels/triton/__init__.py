"""Triton kernels for CUDA cards."""
