"""Models on the disk: checkpoints of runs, and Hugging Face folders."""
