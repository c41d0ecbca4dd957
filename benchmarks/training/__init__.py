"""Benchmarks of training steps and of what is around them."""
