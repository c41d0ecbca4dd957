"""Measurements: one command measures each published figure again."""
