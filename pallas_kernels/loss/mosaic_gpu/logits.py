"""Loss statistics of rows of logits, and their gradient written in place, as a Mosaic GPU kernel.

Device memory bounds the kernel: with the gradient it reads and writes each logit once, 4 bytes for
a 16-bit logit. A Llama's row of 128256 columns (250 KB) does not fit registers. So a block, which
has a multiprocessor to itself, walks over rows and makes two passes over each.

The first pass loads the row by TMA through a ring of slots in shared memory. It takes the maximum
and the sum of exponentials as slots arrive. The second pass writes the gradient. The last slots of
the row stay in shared memory for it: the whole row up to 114688 columns of 16 bits. It reads the
other slots again from the cache: at 128256 columns 132 blocks have 3.8 MB in such slots. It stores
the gradient from the same ring, and loads the next row into the slots that it frees.

All arithmetic is float32. The gradient is rounded once, to the dtype of the logits. Its entry for
the label is formed as `p - 1` in float32.

Above 450 lines, because the two passes share the ring and are one kernel.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu.arrays import at_aligned_addresses
from pallas_kernels.gpu.device import LANES, WARPS_PER_WARPGROUP, target_device
from pallas_kernels.gpu.kernel import gpu_kernel
from pallas_kernels.gpu.layouts import load, rows_of_warps, store
from pallas_kernels.gpu.math import LOG2_E, tanh
from pallas_kernels.loss.mosaic_gpu.logits_config import (
    LINE,
    Config,
    RowSplit,
    check_fits,
    default_config,
)
from pallas_kernels.loss.token_loss import LogitStatistics, LossOptions

_VECTOR = LINE // LANES
# Finite, because the difference of two infinities is NaN.
_LOWEST = float(jnp.finfo(jnp.float32).min)


def unsupported_reason(dtype: jnp.dtype) -> str | None:
    """Why the kernel cannot run logits of this dtype on the default device, or None if it can."""
    device = target_device()
    if not device.has_tma:
        return f"{device.kind} has no tensor memory accelerator, which came with Hopper"
    if dtype not in (jnp.bfloat16, jnp.float16):
        return (
            f"x and its logits are {dtype}, not bfloat16 or float16; cast x to one of these "
            "dtypes, and the weight may keep its own"
        )
    return None


# A program calls this twice, for the first chunk and for the others. JAX lowers a jitted function
# once, which takes 6 s.
@functools.partial(jax.jit, static_argnames=("options", "num_columns", "vocab_size", "config"))
def loss_of_logits(
    logits: Float[Array, "T Vp"],
    labels: Int[Array, " T"],
    options: LossOptions,
    *,
    num_columns: int,
    coefficients: Float[Array, " T"] | None = None,
    lse: Float[Array, " T"] | None = None,
    vocab_size: int | None = None,
    bias: Float[Array, " V"] | None = None,
    config: Config | None = None,
) -> tuple[LogitStatistics | None, Float[Array, "T Vp"] | None]:
    """Statistics of rows of logits, and `coefficients[t] · d loss[t] / d logits[t, v]`.

    The gradient takes the buffer of the logits. A coefficient of 0 gives a row of zeros, whatever
    the logits are.

    Above 80 lines, because it documents many arguments, and their presence decides the launch.

    Args:
      logits: Logits before bias and softcap; `Vp`, a multiple of 128, is `num_columns` with
        padding. The kernel ignores the padding and gives it a gradient of 0.
      labels: Column of each token. A label outside of `[0, num_columns)` is no column.
      options: Options of the loss.
      num_columns: Number of columns without padding.
      coefficients: Factor of each token's loss; without them there is no gradient.
      lse: Logsumexp over the whole vocabulary, if these columns are a part of it. With it the call
        returns the gradient alone.
      vocab_size: Size of the whole vocabulary, over which label smoothing spreads; `num_columns` if
        None.
      bias: Bias of the logits.
      config: Launch parameters; None takes `default_config`.
    """
    num_tokens, padded_columns = logits.shape
    with_statistics, with_gradient = lse is None, coefficients is not None
    assert with_statistics or with_gradient
    if num_tokens == 0:
        empty = jnp.zeros((0,), jnp.float32)
        found = LogitStatistics(*[empty] * len(LogitStatistics._fields))
        return found if with_statistics else None, logits if with_gradient else None
    device = target_device()
    if config is None:
        config = default_config(device, num_columns, logits.dtype)
    check_fits(config, device, logits.dtype)
    split = RowSplit.make(padded_columns // LINE, config)
    num_blocks = min(device.num_sms, num_tokens)
    logits = logits.reshape(num_tokens, split.num_lines, LINE)
    columns = split.columns
    arguments: list[Any] = [logits, labels, *(a for a in (coefficients, lse) if a is not None)]
    if bias is not None:
        # Padded to whole slots, because the kernel loads the bias past the end of the row.
        bias = jnp.pad(bias.astype(jnp.float32), (0, columns - len(bias)))
        arguments.append(bias.reshape(-1, LINE))
    if with_gradient:
        # XLA fuses a slice with the call that reads it. It then does not know that the call writes
        # to its operand. Where the logits were a slice, because XLA had merged the GEMMs of two
        # chunks, the gradient was never written (JAX 0.11.2 and 0.12).
        arguments = list(jax.lax.optimization_barrier(arguments))
    else:
        arguments = at_aligned_addresses(arguments)
    kernel = functools.partial(
        _kernel,
        options=options,
        split=split,
        slots=config.slots,
        num_blocks=num_blocks,
        num_columns=num_columns,
        vocab_size=num_columns if vocab_size is None else vocab_size,
        with_statistics=with_statistics,
        with_gradient=with_gradient,
        with_bias=bias is not None,
    )
    num_statistics = len(LogitStatistics._fields) if with_statistics else 0
    ring_shape = (config.slots, config.warpgroups, split.lines, LINE)
    outputs = gpu_kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((num_tokens,), jnp.float32)] * num_statistics,
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=config.warpgroups,
        thread_name="warpgroup",
        scratch_types=(
            plgpu.SMEM(ring_shape, logits.dtype),
            plgpu.Barrier(num_arrivals=1, num_barriers=config.slots * config.warpgroups),
            # Two places in turn: a warpgroup that is already at the next row must not overwrite the
            # values that a slower one still reads.
            plgpu.SMEM((2, 4, config.warpgroups, WARPS_PER_WARPGROUP), jnp.float32),
            plgpu.Barrier(num_arrivals=config.warpgroups),
        ),
        # No automatic barriers: `commit_smem` hands shared memory from lanes to TMA, and
        # synchronizes. No scratch memory: sums stay within a warp. approx_math takes the exp2 of
        # the hardware, which is right to 2^-22 and gives 0 below 2^-126. The code for smaller
        # numbers would be half of all instructions.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        kernel_name="loss_of_logits",
        in_place=0 if with_gradient else None,
    )(*arguments)
    dlogits = None
    if with_gradient:
        *outputs, dlogits = outputs
        dlogits = dlogits.reshape(num_tokens, padded_columns)
    found = LogitStatistics(*at_aligned_addresses(outputs)) if with_statistics else None
    return found, dlogits


def _kernel(
    logits_gmem: Any,
    labels_gmem: Any,
    *refs: Any,
    options: LossOptions,
    split: RowSplit,
    slots: int,
    num_blocks: int,
    num_columns: int,
    vocab_size: int,
    with_statistics: bool,
    with_gradient: bool,
    with_bias: bool,
):
    """Body of the kernel, for each warpgroup of a block.

    Above 150 lines, because its steps are functions that share the ring and the static choices.
    """
    *arrays, ring_smem, arrived, partial_smem, barrier = refs
    coefficients_gmem, *arrays = arrays if with_gradient else (None, *arrays)
    lse_gmem, *arrays = (None, *arrays) if with_statistics else arrays
    bias_gmem, *outputs = arrays if with_bias else (None, *arrays)
    num_tokens, lines, rounds = logits_gmem.shape[0], split.lines, split.rounds
    block, warpgroup = jax.lax.axis_index("block"), jax.lax.axis_index("warpgroup")
    num_rows = (num_tokens - block + num_blocks - 1) // num_blocks
    layout = rows_of_warps(_VECTOR)
    tile = (WARPS_PER_WARPGROUP, LINE)
    tiles = range(0, lines, WARPS_PER_WARPGROUP)
    cap, smoothing = options.logit_softcap, options.label_smoothing
    # Slots that the second pass over a row has to load again.
    num_reread = max(0, rounds - slots) if with_statistics and with_gradient else 0
    uses_per_row = rounds + num_reread

    def exp(z):
        return jnp.exp2(z * LOG2_E)

    def splat(value):
        return plgpu.layout_cast(jnp.full(tile, value, jnp.float32), layout)

    def first_line(i):
        return (i * split.warpgroups + warpgroup) * lines

    def column_of(line):
        index = lambda axis: plgpu.broadcasted_iota(jnp.int32, tile, axis, layout=layout)
        return (index(0) + line) * LINE + index(1)

    def is_in(label, line):
        return (label >= line * LINE) & (label < (line + lines) * LINE)

    def for_lines_of_slot(line, copy):
        """`copy(number)` for the number of lines that a slot has; a row's last slot may have fewer.

        The number is static. A copy of a whole slot past the end of a row would go on in the next.
        """
        pl.when(line + lines <= split.num_lines)(lambda: copy(lines))
        if left := split.num_lines % lines:
            pl.when(line == split.num_lines - left)(lambda: copy(left))

    # A warpgroup counts the uses of its slots over all its rows. Use u takes slot u % slots.

    def fetch(use):
        step = use // uses_per_row
        position = use - step * uses_per_row
        line = first_line(jnp.where(position < rounds, position, position - rounds))

        slot = jax.lax.rem(use, slots)
        row = block + step * num_blocks

        def load_lines(number):
            plgpu.copy_gmem_to_smem(
                logits_gmem.at[row, pl.ds(line, number)],
                ring_smem.at[slot, warpgroup, pl.ds(0, number)],
                arrived.at[slot * split.warpgroups + warpgroup],
            )

        pl.when(step < num_rows)(lambda: for_lines_of_slot(line, load_lines))

    def wait(use):
        slot = jax.lax.rem(use, slots)
        plgpu.barrier_wait(arrived.at[slot * split.warpgroups + warpgroup])

    def refill(use):
        """Loads the next lines into the slot of a use that is over."""
        plgpu.commit_smem()  # all warps have read the slot
        fetch(use + slots)

    def refill_stored(use, *, stores_after):
        """`refill` of a slot that was stored, and followed by `stores_after` other stores."""
        plgpu.wait_smem_to_gmem(stores_after, wait_read_only=True)
        fetch(use + slots)

    def capped(raw, bias):
        """The logit with bias and softcap, in float32."""
        z = raw.astype(jnp.float32)
        if bias is not None:
            z += bias
        if cap is None:
            return z
        return cap * tanh(z * (1 / cap))

    def tile_at(use, line, i):
        raw = load(ring_smem.at[jax.lax.rem(use, slots), warpgroup, pl.ds(i, tile[0])], layout)
        if bias_gmem is None:
            return capped(raw, None)
        return capped(raw, load(bias_gmem.at[pl.ds(line + i, tile[0])], layout))

    def bias_at(column):
        return None if bias_gmem is None else bias_gmem[column // LINE, column % LINE]

    def only_active(i, run, otherwise):
        """`run()`; `otherwise()` if the row ends before the warpgroup's slot.

        Only the last round may have such a slot. `i` is None for the last round.
        """
        always = i is not None or split.num_lines > (split.warpgroups * rounds - 1) * lines
        return (
            run()
            if always
            else jax.lax.cond(first_line(rounds - 1) < split.num_lines, run, otherwise)
        )

    def accumulate(use, i, label, sums, *, last):
        line = first_line(i)
        wait(use)
        logits = [tile_at(use, line, k) for k in tiles]
        maximum, exp_sum, before, total = sums
        if last and num_columns < split.columns:
            counts = [column_of(line + k) < num_columns for k in tiles]
            if smoothing:
                total += sum(jnp.where(c, z, 0.0) for c, z in zip(counts, logits, strict=True))
            logits = [jnp.where(c, z, _LOWEST) for c, z in zip(counts, logits, strict=True)]
        elif smoothing:
            total += sum(logits)
        here = functools.reduce(jnp.maximum, logits)

        def before_label():
            masked = (
                jnp.where(column_of(line + k) < label, z, _LOWEST)
                for k, z in zip(tiles, logits, strict=True)
            )
            return functools.reduce(jnp.maximum, masked)

        def all_or_none():
            is_before = (line + lines) * LINE <= label
            return jax.lax.cond(is_before, lambda: here, lambda: splat(_LOWEST))

        before = jnp.maximum(before, jax.lax.cond(is_in(label, line), before_label, all_or_none))
        new_maximum = jnp.maximum(maximum, here)
        exp_sum *= exp(maximum - new_maximum)
        exp_sum += sum(exp(z - new_maximum) for z in logits)
        return new_maximum, exp_sum, before, total

    def over_warps(step, sums):
        """The statistics of the whole row: lse, largest, largest_before and total."""
        maximum, exp_sum, before, total = sums
        of_warp = jnp.max(maximum, axis=1)
        spread = jax.lax.broadcast_in_dim(of_warp, tile, (0,))
        parts = [
            of_warp,
            jnp.sum(exp_sum * exp(maximum - spread), axis=1),
            jnp.max(before, axis=1),
        ]
        if smoothing:
            parts.append(jnp.sum(total, axis=1))
        place = jax.lax.rem(step, 2)
        for q, part in enumerate(parts):
            store(partial_smem.at[place, q, warpgroup], part)
        plgpu.barrier_arrive(barrier)
        plgpu.barrier_wait(barrier)
        warps = [(w, i) for w in range(split.warpgroups) for i in range(WARPS_PER_WARPGROUP)]
        get = lambda q: [partial_smem[place, q, w, i] for w, i in warps]
        maxima = get(0)
        largest = functools.reduce(jnp.maximum, maxima)
        exp_sum = sum(s * exp(m - largest) for s, m in zip(get(1), maxima, strict=True))
        # Where all logits are -inf, exp_sum has counted the masked columns.
        lse = jnp.where(largest == _LOWEST, -jnp.inf, largest + jnp.log2(exp_sum) / LOG2_E)
        total = functools.reduce(jnp.add, get(3)) if smoothing else jnp.float32(0)
        return lse, largest, functools.reduce(jnp.maximum, get(2)), total

    def write_gradient(use, i, row, label, coefficient, lse, *, last):
        line = first_line(i)
        slot_smem = ring_smem.at[jax.lax.rem(use, slots), warpgroup]
        p_factor = coefficient
        if options.z_loss:
            p_factor *= 1 + 2 * options.z_loss * lse
        spread_evenly = coefficient * (smoothing / vocab_size)

        def gradient(z, on_label=None):
            g = exp(z - lse) * p_factor
            if smoothing:
                g -= spread_evenly
            if on_label is not None:
                g -= on_label
            if cap is not None:
                g *= 1 - jnp.square(z * (1 / cap))
            return g

        # A label in the padding belongs to another part of the vocabulary.
        label_is_here = is_in(label, line) & (label < num_columns)
        in_slot = jnp.where(label_is_here, label - line * LINE, 0)
        label_index = (in_slot // LINE, in_slot % LINE)

        def read_label():
            z = slot_smem[label_index].astype(jnp.float32)
            plgpu.commit_smem()  # all warps have read it before the first one overwrites it
            return z

        label_logit = jax.lax.cond(label_is_here, read_label, lambda: jnp.float32(0))

        def put(k, g):
            store(slot_smem.at[pl.ds(k, tile[0])], g.astype(slot_smem.dtype))

        @pl.when(coefficient == 0)
        def _nothing():
            for k in tiles:
                put(k, splat(0.0))

        @pl.when(coefficient != 0)
        def _gradient():
            for k in tiles:
                g = gradient(tile_at(use, line, k))
                if last and num_columns < split.num_lines * LINE:
                    g = jnp.where(column_of(line + k) < num_columns, g, 0.0)
                put(k, g)

        plgpu.commit_smem()

        @pl.when(label_is_here & (coefficient != 0))
        def _label():
            z = capped(label_logit, bias_at(label))
            g = gradient(z, coefficient * (1 - smoothing))
            slot_smem[label_index] = g.astype(slot_smem.dtype)
            plgpu.commit_smem()

        def store_lines(number):
            plgpu.copy_smem_to_gmem(
                slot_smem.at[pl.ds(0, number)], logits_gmem.at[row, pl.ds(line, number)]
            )

        for_lines_of_slot(line, store_lines)

    def scalars(step):
        """Label, coefficient and lse of a row, loaded during the work on the row before."""
        row = block + jnp.minimum(step, num_rows - 1) * num_blocks
        get = lambda ref: jnp.float32(0) if ref is None else ref[row]
        return labels_gmem[row], get(coefficients_gmem), get(lse_gmem)

    def one_row(step, of_row):
        label, coefficient, lse = of_row
        row = block + step * num_blocks
        first_use = step * uses_per_row
        if with_statistics:
            is_column = (label >= 0) & (label < num_columns)
            column = jnp.where(is_column, label, 0)
            label_logit = capped(logits_gmem[row, column // LINE, column % LINE], bias_at(column))

            def first_pass(i, sums, last=False):
                run = lambda: accumulate(first_use + i, i, label, sums, last=last)
                sums = only_active(None if last else i, run, lambda: sums)
                if with_gradient:
                    # The last slot of the row before is refilled only now, after its store.
                    pl.when((i == 0) & (step > 0))(
                        lambda: refill_stored(first_use - 1, stores_after=0)
                    )
                if with_gradient and not num_reread:
                    return sums
                # Refills the slots that the second pass cannot find in shared memory anyway.
                pl.when(i < (num_reread if with_gradient else rounds))(
                    lambda: refill(first_use + i)
                )
                return sums

            sums = splat(_LOWEST), splat(0.0), splat(_LOWEST), splat(0.0)
            sums = jax.lax.fori_loop(0, rounds - 1, first_pass, sums)
            lse, largest, before, total = over_warps(step, first_pass(rounds - 1, sums, last=True))

            @pl.when(warpgroup == 0)
            def _store():
                or_none = lambda z: jnp.where(z == _LOWEST, -jnp.inf, z)
                values = LogitStatistics(
                    lse=lse,
                    label_logit=jnp.where(is_column, label_logit, -jnp.inf),
                    largest=or_none(largest),
                    largest_before=or_none(before),
                    total=total,
                )
                for ref, value in zip(outputs, values, strict=True):
                    ref[row] = value

        if with_gradient:

            def second_pass(i, _, *, offset=0, last=False):
                use = first_use + offset + i

                def run():
                    if offset or not with_statistics:
                        wait(use)
                    write_gradient(use, i, row, label, coefficient, lse, last=last)

                only_active(None if last else i, run, lambda: None)
                # Refills the slot before this one, and so need not wait for this one's store.
                first_stored = first_use + num_reread if with_statistics else 0
                pl.when(use > first_stored)(
                    lambda: refill_stored(use - 1, stores_after=0 if last else 1)
                )

            jax.lax.fori_loop(num_reread, rounds - 1, second_pass, None)
            second_pass(rounds - 1, None, last=True)
            if num_reread:
                again = functools.partial(second_pass, offset=rounds)
                jax.lax.fori_loop(0, num_reread, again, None)
        return scalars(step + 1)

    for use in range(slots):
        fetch(use)
    jax.lax.fori_loop(0, num_rows, one_row, scalars(0))
    if with_gradient:
        plgpu.wait_smem_to_gmem(0)
