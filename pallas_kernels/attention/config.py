"""Launch parameters of the forward kernel."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How many heads a block computes, and how many keys it holds.

    Attributes:
      heads: Number of heads of a block, up to 4. The kernel takes the greatest common divisor of
        this number and the number of heads that share keys.
      block_kv: Number of keys of a tile, a multiple of 64 up to 256.
      max_stages: Most tiles of keys, and of values, that shared memory holds; at least 1.
    """

    heads: int
    block_kv: int = 64
    max_stages: int = 4

    def __post_init__(self):
        if not 1 <= self.heads <= 4:
            raise ValueError(f"heads={self.heads} must be from 1 to 4")
        if self.block_kv % 64 or not 64 <= self.block_kv <= 256:
            raise ValueError(f"block_kv={self.block_kv} must be a multiple of 64 up to 256")
        if self.max_stages < 1:
            raise ValueError(f"max_stages={self.max_stages} must be at least 1")


def default_config(head_size: int) -> Config:
    """Launch parameters to use for heads of this size."""
    # With heads of 64 a multiprocessor has two blocks. With heads of 128 it has one, because two
    # warpgroups of twice the registers would share their keys with no others.
    return Config(heads=2 if head_size == 64 else 4)
