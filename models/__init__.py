"""Llama in Flax NNX: model, Hugging Face checkpoints, remat policies, sharding, sampling."""
