"""Measurements: each figure the project publishes can be taken again with one command."""
