"""The passes over the logits of student and teacher, as Mosaic GPU kernels.

Three kernels take the place of XLA's fusions. Device memory bounds the kernels, and arithmetic
bounds the fusions (docs/lab/2026-11-25-distillation-passes.md).

- `distillation_sums` reads both logits once. It keeps the maxima of each row, the sums of
  exponentials relative to them, and for a KL the sum of its terms. If a maximum grows by d, a
  factor `e^-d` rescales the sums.
- `distillation_mixture` reads both logits once more, for the sums of the Jensen-Shannon divergence.
  Its mixture needs both logsumexps.
- `distillation_dlogits` writes the gradient over the student's logits.

A warp has a row at a time, so that sums stay within a warp: no shared memory, and no waiting for
other warps. The columns are split into parts, because a chunk of 1024 rows alone would not fill the
card. A part writes its numbers, and XLA combines the parts of a row. Columns after the last whole
tile are parts of their own, in narrower tiles.

All three add the bias and apply the softcap to what they read, in float32, so that nothing but the
products is in memory. The warps of a block load the same part of a bias.

The teacher's logits may be those of a part of the student's rows. The kernels then read and write
these rows where they lie: XLA might copy a part of an array that a kernel writes in place.

`approx_math` takes exp2 and log2 of the hardware, right to 2^-22; results below 2^-126 are 0.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.distillation.divergence import Divergence, RowReductions, Statistics
from pallas_kernels.distillation.logits import Logits
from pallas_kernels.gpu.arrays import at_aligned_addresses, unsupported_dtype
from pallas_kernels.gpu.device import BYTES_PER_ACCESS, LANES, WARPS_PER_WARPGROUP
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, rows_of_warps, store
from pallas_kernels.gpu.math import LN_2, LOG2_E, tanh

# Rows of a block, one for each warp.
ROWS = WARPS_PER_WARPGROUP
# Accesses of a lane to each array, all on their way together. 1, 2 and 4 were within 5 %.
_ACCESSES = 2
# Tiles of a part. 8 and 24 were within 3 %, and 64 up to 20 % slower.
_TILES = 24
# Maximum before the first logit. With -inf, -inf minus itself would be NaN.
_LOWEST = -1e30
_LARGEST = float(jnp.finfo(jnp.float32).max)


class _Tile(NamedTuple):
    """A tile of a block, which has a row for each warp.

    Attributes:
      vector: Neighbouring elements that a lane loads at once.
      width: Number of columns.
    """

    vector: int
    width: int

    @property
    def layout(self) -> Any:
        """The layout of a tile in registers."""
        return rows_of_warps(self.vector)

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of a tile."""
        return ROWS, self.width


class _Columns:
    """The columns of a row as parts: those of whole tiles, and narrower ones after them."""

    def __init__(self, num_columns: int, itemsize: int):
        vector = BYTES_PER_ACCESS // itemsize
        self.whole = _Tile(vector, _ACCESSES * vector * LANES)
        self.num_tiles = num_columns // self.whole.width
        self.num_whole_parts = pl.cdiv(self.num_tiles, _TILES)
        self.narrow: list[tuple[int, _Tile]] = []
        start = self.num_tiles * self.whole.width
        widths = (self.whole.width // 2, *(v * LANES for v in (4, 2, 1) if v < vector))
        for width in widths:
            while num_columns - start >= width:
                self.narrow.append((start, _Tile(width // LANES, width)))
                start += width
        assert start == num_columns, "unsupported_reason"

    @property
    def num_parts(self) -> int:
        """Number of all parts of a row."""
        return self.num_whole_parts + len(self.narrow)

    def run(self, part: Any, body: Callable[[_Tile, Any, Any], None]) -> None:
        """Calls `body(tile, first column, number of tiles)` for the part of this number."""
        if self.num_whole_parts:

            @pl.when(part < self.num_whole_parts)
            def _whole():
                first = part * _TILES
                number = jnp.minimum(self.num_tiles - first, _TILES)
                body(self.whole, first * self.whole.width, number)

        for i, (start, narrow) in enumerate(self.narrow):

            @pl.when(part == self.num_whole_parts + i)
            def _narrow(start=start, narrow=narrow):
                body(narrow, start, 1)


def unsupported_reason(num_columns: int, *dtypes: Any) -> str | None:
    """Why the kernels do not take logits of these dtypes, or None if they do."""
    for dtype in dtypes:
        reason = unsupported_dtype("dtype of logits", dtype, "set logits_dtype to")
        if reason is not None:
            return reason
    if num_columns % LANES:
        return (
            f"V = {num_columns} on a device is not a multiple of {LANES}; pad the vocabulary, or "
            "split it over fewer devices"
        )
    return None


def statistics(
    divergence: Divergence,
    student: Logits,
    teacher: Logits,
    first_row: Int[Array, ""],
    rows: RowReductions,
) -> Statistics:
    """`divergence.statistics` of the teacher's rows.

    Both logsumexps are in units of log 2, as `dlogits` reads them.

    Args:
      divergence: The divergence.
      student: Logits of the student, of as many rows as the teacher's or more.
      teacher: Logits of the teacher. The number of rows is a multiple of `ROWS`.
      first_row: The student's row that is the teacher's first, int32.
      rows: Reductions over the columns.
    """
    of_kl = {"forward_kl": 1, "reverse_kl": 0}.get(divergence.name)
    sources = _Sources.make(student, teacher, first_row)
    sums = functools.partial(_sums, of_kl)
    start = (_LOWEST, 0.0) * 2 + (0.0,) * (of_kl is not None)
    found = _reduce_columns("distillation_sums", sums, start, sources, ())
    # Over parts, and over the devices that share the vocabulary. Units are log2 up to the end.
    largest, total = found[0:4:2], found[1:4:2]
    tops = [rows.max(jnp.max(a, axis=0)[:, None]) for a in largest]
    factors = [jnp.exp2(a - top[None]) for a, top in zip(largest, tops, strict=True)]
    add = lambda a: rows.sum(jnp.sum(a, axis=0)[:, None])
    totals = [add(a * factor) for a, factor in zip(total, factors, strict=True)]
    lse, teacher_lse = (top + jnp.log2(a) for top, a in zip(tops, totals, strict=True))
    none = jnp.zeros_like(lse)
    if of_kl is not None:
        factor = factors[of_kl]
        terms = add(jnp.where(factor == 0, 0.0, found[4] * factor)) / totals[of_kl] * LN_2
        other = (lse, teacher_lse) if of_kl == 1 else (teacher_lse, lse)
        # Equal logits have equal sums, so the difference is exactly 0.
        return Statistics(terms + (other[0] - other[1]) * LN_2, lse, teacher_lse, none)
    beta = divergence.beta
    mixture = functools.partial(_mixture, beta)
    of_rows = lse, teacher_lse
    parts = _reduce_columns("distillation_mixture", mixture, (0.0, 0.0), sources, of_rows)
    student_part, teacher_part = (add(a) * LN_2 for a in parts)
    loss = beta * teacher_part + (1 - beta) * student_part
    return Statistics(loss, lse, teacher_lse, student_part)


def dlogits(
    divergence: Divergence,
    student: Logits,
    teacher: Logits,
    first_row: Int[Array, ""],
    factors: Float[Array, " T"],
    found: Statistics,
    dtype: Any,
) -> Float[Array, "rows V"]:
    """`factors · divergence.derivative`, times the derivative of the softcap; 0 for a factor of 0.

    A gradient of the dtype of the student's logits takes their memory. Rows that the teacher has
    not stay what they are; there are none with a gradient of another dtype.
    """
    of_student = found.student_part if divergence.name == "jensen_shannon" else found.loss
    numbers = factors, found.lse, found.teacher_lse, of_student
    in_place = student.values.dtype == dtype
    assert in_place or student.values.shape == teacher.values.shape, "one part"
    sources = _Sources.make(student, teacher, first_row)
    columns = _Columns(sources.num_columns, sources.itemsize)

    def kernel(*refs: Any) -> None:
        logits_gmem, refs = refs[: len(sources.arrays)], refs[len(sources.arrays) :]
        out = logits_gmem[0] if in_place else refs[len(numbers)]
        student_rows, rows = sources.rows(logits_gmem)

        def body(tile: _Tile, first: Any, number: Any) -> None:
            of_rows = [load(ref.at[rows], tile.layout.reduce(1)) for ref in refs[: len(numbers)]]
            to_tile = lambda a: jax.lax.broadcast_in_dim(a, tile.shape, (0,))
            factor = to_tile(of_rows[0])

            def step(i: Any, _: Any) -> None:
                place = pl.ds(first + i * tile.width, tile.width)
                (z, slope), (t, _) = sources.load(logits_gmem, tile, (student_rows, rows), place)
                made = _derivative(divergence, z, t, *map(to_tile, of_rows[1:]))
                made = made if slope is None else made * slope
                # Also where a logit is NaN, if the row does not count.
                made = jnp.where(factor == 0.0, 0.0, factor * made)
                store(out.at[student_rows, place], made.astype(dtype))

            jax.lax.fori_loop(0, number, step, None)

        columns.run(jax.lax.axis_index("part"), body)

    result = jax.ShapeDtypeStruct(student.values.shape, dtype)
    results = gpu_kernel(
        kernel,
        kernel_name="distillation_dlogits",
        out_type=() if in_place else (result,),
        grid=(sources.num_rows // ROWS, columns.num_parts),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        in_place=0 if in_place else None,
    )(*sources.arrays, *numbers)
    return results[0]


class _Sources(NamedTuple):
    """The arrays of student and teacher that a kernel reads, and how it reads them.

    Attributes:
      arrays: Logits of student and teacher, the biases that there are, and `[first row]`.
      biased: Whether student and teacher have a bias.
      softcaps: Their bounds.
      scale: Factor of both logits that makes them exponents of 2; they have one temperature.
    """

    arrays: tuple[Array, ...]
    biased: tuple[bool, ...]
    softcaps: tuple[float | None, ...]
    scale: float

    @classmethod
    def make(cls, student: Logits, teacher: Logits, first_row: Int[Array, ""]) -> "_Sources":
        """What the kernels read of these logits."""
        logits = student, teacher
        biases = [one.bias.astype(jnp.float32) for one in logits if one.bias is not None]
        values = [one.values for one in logits]
        return cls(
            at_aligned_addresses((*values, *biases, first_row.reshape(1))),
            tuple(one.bias is not None for one in logits),
            tuple(one.softcap for one in logits),
            LOG2_E / student.temperature,
        )

    @property
    def itemsize(self) -> int:
        """Bytes of a logit, the larger of both."""
        return max(a.dtype.itemsize for a in self.arrays[:2])

    @property
    def num_rows(self) -> int:
        """Number of rows of the teacher."""
        return self.arrays[1].shape[0]

    @property
    def num_columns(self) -> int:
        """Number of columns."""
        return self.arrays[1].shape[1]

    def rows(self, gmems: Sequence[Any]) -> tuple[Any, Any]:
        """The rows of a block in the student's logits, and in all arrays of the teacher's rows."""
        row = jax.lax.axis_index("row") * ROWS
        return pl.ds(gmems[-1][0] + row, ROWS), pl.ds(row, ROWS)

    def load(
        self, gmems: Sequence[Any], tile: _Tile, rows: tuple[Any, Any], columns: Any
    ) -> list[tuple[jax.Array, jax.Array | None]]:
        """`(exponent of 2, derivative of the softcap)` of student and teacher in a tile."""
        biases = iter(gmems[2:])
        found = []
        for gmem, at, has_bias, softcap in zip(
            gmems[:2], rows, self.biased, self.softcaps, strict=True
        ):
            z = load(gmem.at[at, columns], tile.layout).astype(jnp.float32)
            if has_bias:
                bias = load(next(biases).at[columns], tile.layout.reduce(0))
                z += jax.lax.broadcast_in_dim(bias, tile.shape, (1,))
            slope = None
            if softcap is not None:
                bounded = tanh(z * (1 / softcap))
                z, slope = softcap * bounded, 1 - jnp.square(bounded)
            found.append((z * self.scale, slope))
        return found


def _reduce_columns(
    name: str,
    step: Callable[..., list[jax.Array]],
    start: tuple[float, ...],
    sources: _Sources,
    numbers: Sequence[Float[Array, " T"]],
) -> list[Float[Array, "parts T"]]:
    """Running numbers of each part of each row.

    Args:
      name: Name of the kernel.
      step: Function `(running, *tiles, *numbers) -> running`; the tiles are exponents of 2 in
        float32, and the numbers spread over them.
      start: Running numbers before the first tile.
      sources: Logits of student and teacher.
      numbers: Numbers of each row.
    """
    columns = _Columns(sources.num_columns, sources.itemsize)

    def kernel(*refs: Any) -> None:
        gmems, refs = refs[: len(sources.arrays)], refs[len(sources.arrays) :]
        of_rows, outs = refs[: len(numbers)], refs[len(numbers) :]
        number_of_part = jax.lax.axis_index("part")
        student_rows, rows = sources.rows(gmems)

        def body(tile: _Tile, first: Any, number: Any) -> None:
            layout = tile.layout.reduce(1)
            to_tile = lambda a: jax.lax.broadcast_in_dim(a, tile.shape, (0,))
            spread = [to_tile(load(ref.at[rows], layout)) for ref in of_rows]
            filled = lambda value: plgpu.layout_cast(jnp.full((ROWS,), value, jnp.float32), layout)

            def one(i: Any, running: Any) -> Any:
                place = pl.ds(first + i * tile.width, tile.width)
                exponents = [z for z, _ in sources.load(gmems, tile, (student_rows, rows), place)]
                return step(running, *exponents, *spread)

            running = jax.lax.fori_loop(0, number, one, list(map(filled, start)))
            for out, value in zip(outs, running, strict=True):
                store(out.at[number_of_part, rows], value)

        columns.run(number_of_part, body)

    out = jax.ShapeDtypeStruct((columns.num_parts, sources.num_rows), jnp.float32)
    found = gpu_kernel(
        kernel,
        kernel_name=name,
        out_type=(out,) * len(start),
        grid=(sources.num_rows // ROWS, columns.num_parts),
        grid_names=("row", "part"),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(*sources.arrays, *numbers)
    return list(at_aligned_addresses(tuple(found)))


def _sums(of_kl: int | None, running: Any, *exponents: jax.Array) -> list[jax.Array]:
    """Running maxima, sums of powers of 2 relative to them and, for a KL, the sum of its terms.

    `of_kl` is the source of the KL's probabilities, 0 the student or 1 the teacher; None is no KL.
    """
    to_tile = lambda a: jax.lax.broadcast_in_dim(a, exponents[0].shape, (0,))
    results, changes, powers = [], [], []
    for exponent, largest, total in zip(exponents, running[0:4:2], running[1:4:2], strict=True):
        new = jnp.maximum(largest, jnp.max(exponent, axis=1))
        changes.append(jnp.exp2(largest - new))
        powers.append(jnp.exp2(exponent - to_tile(new)))
        results += [new, total * changes[-1] + jnp.sum(powers[-1], axis=1)]
    if of_kl is not None:
        own, other = exponents[of_kl], exponents[1 - of_kl]
        terms = jnp.where(powers[of_kl] == 0.0, 0.0, powers[of_kl] * (own - other))
        # An infinite term of a probability that is 0 by now adds nothing.
        before = jnp.where(changes[of_kl] == 0.0, 0.0, running[4] * changes[of_kl])
        results.append(before + jnp.sum(terms, axis=1))
    return results


def _log2_ratios(
    beta: float, z: jax.Array, t: jax.Array, lse: jax.Array, teacher_lse: jax.Array
) -> tuple[jax.Array, ...]:
    """`(p, q, log2(p / M), log2(q / M))` of exponents of 2."""
    log_p, log_q = z - lse, t - teacher_lse
    p, q = jnp.exp2(log_p), jnp.exp2(log_q)
    mixture = jnp.maximum(beta * q + (1 - beta) * p, float(jnp.finfo(jnp.float32).tiny))
    log_m = jnp.log2(mixture)
    return p, q, log_p - log_m, log_q - log_m


def _mixture(beta: float, running: Any, *args: jax.Array) -> list[jax.Array]:
    """Sums of `p · log2(p / M)` and `q · log2(q / M)`."""
    p, q, of_p, of_q = _log2_ratios(beta, *args)
    terms = (jnp.where(a == 0.0, 0.0, a * of_a) for a, of_a in ((p, of_p), (q, of_q)))
    return [total + jnp.sum(a, axis=1) for total, a in zip(running, terms, strict=True)]


def _derivative(
    divergence: Divergence,
    z: jax.Array,
    t: jax.Array,
    lse: jax.Array,
    teacher_lse: jax.Array,
    of_row: jax.Array,
) -> jax.Array:
    """`divergence.derivative` for exponents of 2. `of_row` is a sum of the row, in nats."""
    log_p, log_q = z - lse, t - teacher_lse
    match divergence.name:
        case "forward_kl":
            return jnp.exp2(log_p) - jnp.exp2(log_q)
        case "reverse_kl":
            p = jnp.exp2(log_p)
            above = (log_p - log_q) * LN_2 - of_row
            return jnp.where(p == 0.0, 0.0, p * jnp.minimum(above, _LARGEST))
    p, _, of_p, _ = _log2_ratios(divergence.beta, z, t, lse, teacher_lse)
    above = of_p * LN_2 - of_row
    return (1 - divergence.beta) * jnp.where(p == 0.0, 0.0, p * above)
