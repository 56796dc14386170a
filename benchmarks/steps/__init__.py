"""Measurements of this machine: sweeps of training steps, and the record and table of all benchmarks."""
