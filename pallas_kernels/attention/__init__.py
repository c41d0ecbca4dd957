"""Causal attention of each token to its own document, in rows that hold several documents."""
