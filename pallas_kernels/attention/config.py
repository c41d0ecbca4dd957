"""Launch parameters of the forward kernel."""

import dataclasses

MOST_ROWS = 256  # rows that TMA copies at a time


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How a block shares its queries among warpgroups, and how many keys it holds.

    Attributes:
      warpgroups: Number of warpgroups that compute, 1 to 3.
      block_q: Number of queries of such a warpgroup, a multiple of 64.
      block_kv: Number of keys of a tile, a multiple of 64.
      max_stages: Most tiles of keys, and of values, that shared memory holds.
      in_turns: Whether the warpgroups take turns at the tensor cores, so that the softmax of one
        runs beside the products of another.
      overlap: Whether a warpgroup issues the products with the next keys before those with the
        values have ended. Registers then hold the scores of a tile and the exponentials of another.
    """

    warpgroups: int = 2
    block_q: int = 64
    block_kv: int = 128
    max_stages: int = 2
    in_turns: bool = True
    overlap: bool = False

    def __post_init__(self):
        if self.warpgroups not in (1, 2, 3):
            raise ValueError(f"warpgroups={self.warpgroups} must be 1, 2 or 3")
        if self.block_q % 64 or not 64 <= self.rows <= MOST_ROWS:
            raise ValueError(
                f"block_q={self.block_q} must be a multiple of 64, and with warpgroups="
                f"{self.warpgroups} a block may have {MOST_ROWS} queries"
            )
        if self.block_kv % 64 or not 64 <= self.block_kv <= MOST_ROWS:
            raise ValueError(f"block_kv={self.block_kv} must be a multiple of 64 up to {MOST_ROWS}")
        if self.max_stages < 1:
            raise ValueError(f"max_stages={self.max_stages} must be at least 1")

    @property
    def rows(self) -> int:
        """Number of queries of a block."""
        return self.warpgroups * self.block_q


def default_config(head_size: int) -> Config:
    """Launch parameters to use for heads of this size."""
    # With heads of 128 `overlap` spills registers. A tile of keys and values has 32 KiB for each 64
    # numbers of a head.
    return Config(max_stages=2) if head_size > 64 else Config(max_stages=4, overlap=True)
