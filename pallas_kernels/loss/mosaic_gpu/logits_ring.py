"""The ring of slots in shared memory, through which rows of logits go to a block and back.

A row is `lines` of 128 columns, which `RowSplit` deals to the slots of the warpgroups of a block.
Each warpgroup has a ring of its own. It counts the uses of its slots over all its rows: use u takes
slot `u % slots`. The uses of a row are its rounds, and then those rounds that the second pass has
to load again.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.loss.mosaic_gpu.logits_config import RowSplit


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
    """The ring of a warpgroup.

    Attributes:
      logits_gmem: Logits in device memory, `[tokens, lines, 128]`.
      smem: Slots of all warpgroups, `[slots, warpgroups, lines of a slot, 128]`.
      arrived: Barrier of each slot of each warpgroup.
      split: How a row is dealt to slots.
      num_reread: Number of slots of a row that the second pass loads again.
      num_blocks: Number of blocks. A block takes every `num_blocks`-th row.
      num_rows: Number of rows of this block.
      block: Number of this block.
      warpgroup: Number of this warpgroup.
    """

    logits_gmem: Any
    smem: Any
    arrived: Any
    split: RowSplit
    num_reread: int
    num_blocks: int
    num_rows: Any
    block: Any
    warpgroup: Any

    @property
    def num_slots(self) -> int:
        """Number of slots of a warpgroup."""
        return self.smem.shape[0]

    @property
    def uses_per_row(self) -> int:
        """Number of uses of slots for a row."""
        return self.split.rounds + self.num_reread

    def row(self, step: Any) -> Any:
        """The row that the block works on in this step."""
        return self.block + step * self.num_blocks

    def first_line(self, i: Any) -> Any:
        """The first line of the warpgroup's slot in round `i` of a row."""
        return (i * self.split.warpgroups + self.warpgroup) * self.split.lines

    def slot(self, use: Any) -> Any:
        """The shared memory of a use, `[lines, 128]`."""
        return self.smem.at[jax.lax.rem(use, self.num_slots), self.warpgroup]

    def lines(self, use: Any, first: int, number: int) -> Any:
        """The shared memory of some lines of a use."""
        slot = jax.lax.rem(use, self.num_slots)
        return self.smem.at[slot, self.warpgroup, pl.ds(first, number)]

    def fetch(self, use: Any) -> None:
        """Starts to load the lines of a use; nothing after the last row."""
        step = use // self.uses_per_row
        position = use - step * self.uses_per_row
        rounds = self.split.rounds
        line = self.first_line(jnp.where(position < rounds, position, position - rounds))
        slot = jax.lax.rem(use, self.num_slots)
        row = self.row(step)

        def load_lines(number):
            plgpu.copy_gmem_to_smem(
                self.logits_gmem.at[row, pl.ds(line, number)],
                self.smem.at[slot, self.warpgroup, pl.ds(0, number)],
                self.arrived.at[slot * self.split.warpgroups + self.warpgroup],
            )

        pl.when(step < self.num_rows)(lambda: self._for_lines(line, load_lines))

    def wait(self, use: Any) -> None:
        """Waits until the lines of a use have arrived."""
        slot = jax.lax.rem(use, self.num_slots)
        plgpu.barrier_wait(self.arrived.at[slot * self.split.warpgroups + self.warpgroup])

    def refill(self, use: Any) -> None:
        """Loads the next lines into the slot of a use that is over."""
        plgpu.commit_smem()  # all warps have read the slot
        self.fetch(use + self.num_slots)

    def refill_stored(self, use: Any, *, stores_after: int) -> None:
        """`refill` of a slot that was stored, and followed by `stores_after` other stores."""
        plgpu.wait_smem_to_gmem(stores_after, wait_read_only=True)
        self.fetch(use + self.num_slots)

    def store(self, slot_smem: Any, row: Any, line: Any) -> None:
        """Starts to store a slot over the lines of a row from `line` on."""

        def store_lines(number):
            plgpu.copy_smem_to_gmem(
                slot_smem.at[pl.ds(0, number)], self.logits_gmem.at[row, pl.ds(line, number)]
            )

        self._for_lines(line, store_lines)

    def if_active(
        self, i: Any, run: Callable[[], Any], otherwise: Callable[[], Any], *, last: bool
    ) -> Any:
        """`run()` for a slot in round `i`; `otherwise()` if the row ends before the slot.

        Only the last round may have such a slot.
        """
        split = self.split
        before_last_slot = (split.warpgroups * split.rounds - 1) * split.lines
        if not last or split.num_lines > before_last_slot:
            return run()
        return jax.lax.cond(self.first_line(i) < split.num_lines, run, otherwise)

    def _for_lines(self, line: Any, copy: Callable[[int], None]) -> None:
        """`copy(number)` for the number of lines that a slot has; a row's last slot may have fewer.

        The number is static. A copy of a whole slot past the end of a row would go on in the next.
        """
        num_lines, lines = self.split.num_lines, self.split.lines
        pl.when(line + lines <= num_lines)(lambda: copy(lines))
        if left := num_lines % lines:
            pl.when(line == num_lines - left)(lambda: copy(left))
