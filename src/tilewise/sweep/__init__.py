"""Sweeps: kernels x problems measured in isolated workers, into a store that survives anything."""
