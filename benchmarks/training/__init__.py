"""Benchmarks of training steps, their memory, their data and their exchange between GPUs."""
