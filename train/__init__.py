"""Training of a Llama: configuration, data, step, loop, metrics and report."""
