"""A run that takes milliseconds; tests change some of its fields."""

import dataclasses

from train.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig, preset

# Its vocabulary has a token for each byte.
MODEL = dataclasses.replace(
    preset("demo").model,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
    dtype="float32",
)
CONFIG = TrainConfig(
    name="tiny",
    model=dataclasses.replace(MODEL, vocab_size=64),
    data=DataConfig(source="synthetic", sequence_length=16, batch_size=8),
    optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=1),
    steps=8,
    eval_every=0,
    sample_tokens=0,
    save=False,
)
# A run on text, the sources of the standard library. Tests put a small corpus in their place.
ON_LIBRARY = dataclasses.replace(
    CONFIG,
    model=MODEL,
    data=DataConfig(source="stdlib", sequence_length=32, batch_size=8, accumulation_steps=2),
    mesh=MeshConfig(fsdp=2),
    steps=5,
    log_every=1,
)
