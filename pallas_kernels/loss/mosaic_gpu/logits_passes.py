"""The two passes over each row of logits, as the body of the kernel that `logits.py` launches.

The first pass gives the statistics of a row, the second one writes its gradient. A warp works on
tiles of one line, 128 columns, and the four warps of a warpgroup on neighbouring lines.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gpu.device import LANES, WARPS_PER_WARPGROUP
from pallas_kernels.gpu.layouts import load, rows_of_warps, store
from pallas_kernels.gpu.math import LOG2_E, tanh
from pallas_kernels.loss.mosaic_gpu.logits_config import LINE, RowSplit
from pallas_kernels.loss.mosaic_gpu.logits_ring import Ring
from pallas_kernels.loss.token_loss import LogitStatistics, LossOptions

# Finite, because the difference of two infinities is NaN.
_LOWEST = float(jnp.finfo(jnp.float32).min)
_TILE = (WARPS_PER_WARPGROUP, LINE)
_LAYOUT = rows_of_warps(LINE // LANES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choices:
    """Static choices of the kernel.

    Attributes:
      options: Options of the loss.
      split: How a row is dealt to the slots of the ring.
      num_blocks: Number of blocks of the grid.
      num_columns: Number of columns without padding.
      vocab_size: Number of columns over which label smoothing spreads.
      with_statistics: Whether there is a first pass. Otherwise the logsumexp is an argument.
      with_gradient: Whether there is a second pass, which needs coefficients.
      with_bias: Whether there is a bias.
    """

    options: LossOptions
    split: RowSplit
    num_blocks: int
    num_columns: int
    vocab_size: int
    with_statistics: bool
    with_gradient: bool
    with_bias: bool


def kernel(logits_gmem: Any, labels_gmem: Any, *refs: Any, choices: Choices) -> None:
    """Body of the kernel, for each warpgroup of a block.

    Args:
      logits_gmem: Logits, `[tokens, lines, 128]`. The gradient is written over them.
      labels_gmem: Label of each token.
      *refs: Coefficients, logsumexps and bias, as far as the choices say that there are any; a
        float32 array for each of `LogitStatistics` if they are computed; the scratch memory.
      choices: Static choices.
    """
    *arrays, ring_smem, arrived, partial_smem, barrier = refs
    coefficients_gmem, *arrays = arrays if choices.with_gradient else (None, *arrays)
    lse_gmem, *arrays = (None, *arrays) if choices.with_statistics else arrays
    bias_gmem, *outputs = arrays if choices.with_bias else (None, *arrays)
    block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
    num_blocks = choices.num_blocks
    num_rows = (logits_gmem.shape[0] - block + num_blocks - 1) // num_blocks
    both = choices.with_statistics and choices.with_gradient
    ring = Ring(
        logits_gmem=logits_gmem,
        smem=ring_smem,
        arrived=arrived,
        split=choices.split,
        num_reread=max(0, choices.split.rounds - ring_smem.shape[0]) if both else 0,
        num_blocks=num_blocks,
        num_rows=num_rows,
        block=block,
        warpgroup=warpgroup,
    )
    passes = _Passes(
        choices=choices,
        ring=ring,
        labels_gmem=labels_gmem,
        coefficients_gmem=coefficients_gmem,
        lse_gmem=lse_gmem,
        bias_gmem=bias_gmem,
        outputs=outputs,
        partial_smem=partial_smem,
        barrier=barrier,
    )
    for use in range(ring.num_slots):
        ring.fetch(use)
    jax.lax.fori_loop(0, num_rows, passes.one_row, passes.numbers_of_row(0))
    if choices.with_gradient:
        plgpu.wait_smem_to_gmem(0)


class _Sums(NamedTuple):
    """What each lane has added up of a row so far, `[4, 128]` in float32.

    Attributes:
      largest: Largest logit.
      sum_exp: Sum of the exponentials relative to `largest`.
      before: Largest logit before the label's column.
      total: Sum of the logits, for label smoothing.
    """

    largest: Any
    sum_exp: Any
    before: Any
    total: Any


class _Slope(NamedTuple):
    """Factors of a row's gradient, and its logsumexp.

    Attributes:
      of_softmax: Factor of the softmax.
      of_all: Number that label smoothing subtracts in every column.
      lse: Logsumexp of the row.
    """

    of_softmax: Any
    of_all: Any
    lse: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Passes:
    """The passes over the rows of a block.

    Attributes:
      choices: Static choices.
      ring: Ring of the warpgroup.
      labels_gmem: Label of each token.
      coefficients_gmem: Coefficient of each token; None without a second pass.
      lse_gmem: Logsumexp of each token; None with a first pass.
      bias_gmem: Bias as `[lines, 128]`, or None.
      outputs: Arrays of the statistics.
      partial_smem: Numbers of each warp of the block, `[2, 4, warpgroups, 4]`.
      barrier: Barrier of all warpgroups.
    """

    choices: Choices
    ring: Ring
    labels_gmem: Any
    coefficients_gmem: Any
    lse_gmem: Any
    bias_gmem: Any
    outputs: Sequence[Any]
    partial_smem: Any
    barrier: Any

    @property
    def _tiles(self) -> range:
        """The first line of each tile of a slot."""
        return range(0, self.choices.split.lines, WARPS_PER_WARPGROUP)

    def numbers_of_row(self, step: Any) -> tuple[Any, Any, Any]:
        """Label, coefficient and lse of a row, loaded during the work on the row before."""
        row = self.ring.row(jnp.minimum(step, self.ring.num_rows - 1))
        get = lambda ref: jnp.float32(0) if ref is None else ref[row]
        return self.labels_gmem[row], get(self.coefficients_gmem), get(self.lse_gmem)

    def one_row(self, step: Any, of_row: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """Both passes over a row; returns the numbers of the next row."""
        label, coefficient, lse = of_row
        row = self.ring.row(step)
        first_use = step * self.ring.uses_per_row
        if self.choices.with_statistics:
            is_column = (label >= 0) & (label < self.choices.num_columns)
            label_logit = self._logit(row, jnp.where(is_column, label, 0))
            sums = self._first_pass(step, first_use, label)
            lse, largest, before, total = self._over_warps(step, sums)

            @pl.when(self.ring.warpgroup == 0)
            def _store():
                or_none = lambda z: jnp.where(z == _LOWEST, -jnp.inf, z)
                values = LogitStatistics(
                    lse=lse,
                    label_logit=jnp.where(is_column, label_logit, -jnp.inf),
                    largest=or_none(largest),
                    largest_before=or_none(before),
                    total=total,
                )
                for ref, value in zip(self.outputs, values, strict=True):
                    ref[row] = value

        if self.choices.with_gradient:
            self._second_pass(first_use, row, label, coefficient, lse)
        return self.numbers_of_row(step + 1)

    # The first pass.

    def _first_pass(self, step: Any, first_use: Any, label: Any) -> _Sums:
        """What the lanes add up of a row."""
        ring, with_gradient = self.ring, self.choices.with_gradient

        def one_slot(i, sums, last=False):
            run = lambda: self._add_slot(first_use + i, i, label, sums, last=last)
            sums = ring.if_active(i, run, lambda: sums, last=last)
            if with_gradient:
                # The last slot of the row before is refilled only now, after its store.
                pl.when((i == 0) & (step > 0))(
                    lambda: ring.refill_stored(first_use - 1, stores_after=0)
                )
            if with_gradient and not ring.num_reread:
                return sums
            # Refills the slots that the second pass cannot find in shared memory anyway.
            num_refilled = ring.num_reread if with_gradient else ring.split.rounds
            pl.when(i < num_refilled)(lambda: ring.refill(first_use + i))
            return sums

        start = _Sums(_splat(_LOWEST), _splat(0.0), _splat(_LOWEST), _splat(0.0))
        sums = jax.lax.fori_loop(0, ring.split.rounds - 1, one_slot, start)
        return one_slot(ring.split.rounds - 1, sums, last=True)

    def _add_slot(self, use: Any, i: Any, label: Any, sums: _Sums, *, last: bool) -> _Sums:
        """The sums with the slot of round `i`; only the last round may have padding."""
        line = self.ring.first_line(i)
        self.ring.wait(use)
        logits = [self._load_tile(use, line, k) for k in self._tiles]
        total, smoothing = sums.total, self.choices.options.label_smoothing
        if last and self.choices.num_columns < self.choices.split.columns:
            counts = [_column_of(line + k) < self.choices.num_columns for k in self._tiles]
            if smoothing:
                total += sum(jnp.where(c, z, 0.0) for c, z in zip(counts, logits, strict=True))
            logits = [jnp.where(c, z, _LOWEST) for c, z in zip(counts, logits, strict=True)]
        elif smoothing:
            total += sum(logits)
        here = functools.reduce(jnp.maximum, logits)
        before = jnp.maximum(sums.before, self._largest_before(label, line, logits, here))
        largest = jnp.maximum(sums.largest, here)
        sum_exp = sums.sum_exp * _exp(sums.largest - largest)
        sum_exp += sum(_exp(z - largest) for z in logits)
        return _Sums(largest, sum_exp, before, total)

    def _largest_before(self, label: Any, line: Any, logits: list[Any], largest: Any) -> Any:
        """The largest logit of a slot before the label's column, for each lane.

        Only a slot with the label compares columns with it.
        """

        def in_slot():
            masked = (
                jnp.where(_column_of(line + k) < label, z, _LOWEST)
                for k, z in zip(self._tiles, logits, strict=True)
            )
            return functools.reduce(jnp.maximum, masked)

        def all_or_none():
            is_before = (line + self.choices.split.lines) * LINE <= label
            return jax.lax.cond(is_before, lambda: largest, lambda: _splat(_LOWEST))

        return jax.lax.cond(self._is_in_slot(label, line), in_slot, all_or_none)

    def _over_warps(self, step: Any, sums: _Sums) -> tuple[Any, Any, Any, Any]:
        """The statistics of the whole row: lse, largest, largest_before and total."""
        smoothing = self.choices.options.label_smoothing
        of_warp = jnp.max(sums.largest, axis=1)
        spread = jax.lax.broadcast_in_dim(of_warp, _TILE, (0,))
        parts = [
            of_warp,
            jnp.sum(sums.sum_exp * _exp(sums.largest - spread), axis=1),
            jnp.max(sums.before, axis=1),
        ]
        if smoothing:
            parts.append(jnp.sum(sums.total, axis=1))
        place = jax.lax.rem(step, 2)
        for q, part in enumerate(parts):
            store(self.partial_smem.at[place, q, self.ring.warpgroup], part)
        plgpu.barrier_arrive(self.barrier)
        plgpu.barrier_wait(self.barrier)
        warpgroups = self.choices.split.warpgroups
        warps = [(w, i) for w in range(warpgroups) for i in range(WARPS_PER_WARPGROUP)]
        get = lambda q: [self.partial_smem[place, q, w, i] for w, i in warps]
        maxima = get(0)
        largest = functools.reduce(jnp.maximum, maxima)
        sum_exp = sum(s * _exp(m - largest) for s, m in zip(get(1), maxima, strict=True))
        # Where all logits are -inf, sum_exp has counted the masked columns.
        lse = jnp.where(largest == _LOWEST, -jnp.inf, largest + jnp.log2(sum_exp) / LOG2_E)
        total = functools.reduce(jnp.add, get(3)) if smoothing else jnp.float32(0)
        return lse, largest, functools.reduce(jnp.maximum, get(2)), total

    # The second pass.

    def _second_pass(
        self, first_use: Any, row: Any, label: Any, coefficient: Any, lse: Any
    ) -> None:
        """Writes the gradient of a row."""
        ring, with_statistics = self.ring, self.choices.with_statistics
        num_reread, rounds = ring.num_reread, ring.split.rounds

        def one_slot(i, _, *, offset=0, last=False):
            use = first_use + offset + i

            def run():
                if offset or not with_statistics:
                    ring.wait(use)
                self._write_gradient(use, i, row, label, coefficient, lse, last=last)

            ring.if_active(i, run, lambda: None, last=last)
            # Refills the slot before this one, and so need not wait for this one's store.
            first_stored = first_use + num_reread if with_statistics else 0
            pl.when(use > first_stored)(
                lambda: ring.refill_stored(use - 1, stores_after=0 if last else 1)
            )

        jax.lax.fori_loop(num_reread, rounds - 1, one_slot, None)
        one_slot(rounds - 1, None, last=True)
        if num_reread:
            again = functools.partial(one_slot, offset=rounds)
            jax.lax.fori_loop(0, num_reread, again, None)

    def _write_gradient(
        self, use: Any, i: Any, row: Any, label: Any, coefficient: Any, lse: Any, *, last: bool
    ) -> None:
        """Writes the gradient of a slot over its logits, and starts to store it."""
        choices, line, slot_smem = self.choices, self.ring.first_line(i), self.ring.slot(use)
        smoothing = choices.options.label_smoothing
        slope = self._slope(coefficient, lse)
        # A label in the padding belongs to another part of the vocabulary.
        label_is_here = self._is_in_slot(label, line) & (label < choices.num_columns)
        in_slot = jnp.where(label_is_here, label - line * LINE, 0)
        label_index = (in_slot // LINE, in_slot % LINE)

        def read_label():
            z = slot_smem[label_index].astype(jnp.float32)
            plgpu.commit_smem()  # all warps have read it before the first one overwrites it
            return z

        label_logit = jax.lax.cond(label_is_here, read_label, lambda: jnp.float32(0))

        def put(k, g):
            store(slot_smem.at[pl.ds(k, WARPS_PER_WARPGROUP)], g.astype(slot_smem.dtype))

        @pl.when(coefficient == 0)
        def _nothing():
            for k in self._tiles:
                put(k, _splat(0.0))

        @pl.when(coefficient != 0)
        def _gradient():
            for k in self._tiles:
                g = self._gradient(self._load_tile(use, line, k), slope)
                if last and choices.num_columns < choices.split.num_lines * LINE:
                    g = jnp.where(_column_of(line + k) < choices.num_columns, g, 0.0)
                put(k, g)

        plgpu.commit_smem()

        @pl.when(label_is_here & (coefficient != 0))
        def _label():
            z = self._capped(label_logit, self._bias_at(label))
            g = self._gradient(z, slope, coefficient * (1 - smoothing))
            slot_smem[label_index] = g.astype(slot_smem.dtype)
            plgpu.commit_smem()

        self.ring.store(slot_smem, row, line)

    def _slope(self, coefficient: Any, lse: Any) -> _Slope:
        """The factors of the gradient of `coefficient · loss`."""
        options, of_softmax = self.choices.options, coefficient
        if options.z_loss:
            of_softmax *= 1 + 2 * options.z_loss * lse
        of_all = coefficient * (options.label_smoothing / self.choices.vocab_size)
        return _Slope(of_softmax, of_all, lse)

    def _gradient(self, z: Any, slope: _Slope, of_label: Any = None) -> Any:
        """The gradient in raw logits, from those with bias and softcap.

        Args:
          z: Logits with bias and softcap.
          slope: Factors of the row.
          of_label: Number to subtract in the label's column; None for other columns.
        """
        g = _exp(z - slope.lse) * slope.of_softmax
        if self.choices.options.label_smoothing:
            g -= slope.of_all
        if of_label is not None:
            g -= of_label
        cap = self.choices.options.logit_softcap
        if cap is not None:
            g *= 1 - jnp.square(z * (1 / cap))
        return g

    # Logits.

    def _load_tile(self, use: Any, line: Any, k: int) -> Any:
        """Tile `k` of a slot that begins with `line`, with bias and softcap, in float32."""
        raw = load(self.ring.lines(use, k, WARPS_PER_WARPGROUP), _LAYOUT)
        if self.bias_gmem is None:
            return self._capped(raw, None)
        bias = load(self.bias_gmem.at[pl.ds(line + k, WARPS_PER_WARPGROUP)], _LAYOUT)
        return self._capped(raw, bias)

    def _logit(self, row: Any, column: Any) -> Any:
        """One logit from device memory, with bias and softcap, in float32."""
        raw = self.ring.logits_gmem[row, column // LINE, column % LINE]
        return self._capped(raw, self._bias_at(column))

    def _bias_at(self, column: Any) -> Any:
        """The bias of a column; None if there is none."""
        return None if self.bias_gmem is None else self.bias_gmem[column // LINE, column % LINE]

    def _capped(self, raw: Any, bias: Any) -> Any:
        """The logit with bias and softcap, in float32."""
        z = raw.astype(jnp.float32)
        if bias is not None:
            z += bias
        cap = self.choices.options.logit_softcap
        return z if cap is None else cap * tanh(z * (1 / cap))

    def _is_in_slot(self, label: Any, line: Any) -> Any:
        """Whether the label is a column of the slot that begins with this line."""
        return (label >= line * LINE) & (label < (line + self.choices.split.lines) * LINE)


def _exp(z: Any) -> Any:
    return jnp.exp2(z * LOG2_E)


def _splat(value: float) -> Any:
    """The same number in a whole tile."""
    return plgpu.layout_cast(jnp.full(_TILE, value, jnp.float32), _LAYOUT)


def _column_of(line: Any) -> Any:
    """The column of each element of the tile that begins with this line."""
    index = lambda axis: plgpu.broadcasted_iota(jnp.int32, _TILE, axis, layout=_LAYOUT)
    return (index(0) + line) * LINE + index(1)
