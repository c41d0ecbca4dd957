"""Benchmarks of the operations, against XLA and peers."""
