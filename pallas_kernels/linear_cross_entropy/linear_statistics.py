"""Statistics of `x @ weight.T` over the vocabulary, without the logits in memory; for Hopper.

The loss of a token and its gradient need of the `[T, V]` logits a few numbers a row: the logsumexp,
the label's logit, and maxima for the accuracy. Here the logits exist as wgmma accumulators only.

What it moves, at T=8192, D=4096, V=128256 in bfloat16: `2·T·D·V` = 8.6 Tflop, which take 10.9 ms at
the 791 TF/s that cuBLAS reaches on an H100. `weight` is 1.05 GB and `x` 67 MB, 0.37 ms of device
memory if each is read once; the logits that are not written and read back would be 2.1 GB, twice.
So it is a GEMM, bound by the tensor cores, and all that is not a wgmma has to hide behind one.

The design:

- A persistent block has 128 rows by `tile_n` columns: two warpgroups of `64 x tile_n` that share
  the tile of `weight`, and a third that brings operands by TMA, `stages` steps of 64 in D ahead.
  Its steps run on through the tiles, so that the operands of the next are there when the statistics
  of this one are done.
- A warpgroup issues the wgmma of a step before it waits for the one before (`in_flight=1`): the
  tensor cores do not wait for the wait. With `lead`, the second warpgroup starts each tile that
  many steps after the first, so that one multiplies while the other takes statistics.
- `cluster=2` blocks with different rows share the tile of `weight`: each loads half and multicasts
  it, which takes a step's reads of the L2 from 48 to 32 KiB a block (256 columns).
- The tiles are dealt to the blocks one by one, so that no block has more than one more than another
  (243 of 242.9 at the shape above). Tiles that run together must share operands in the L2: they are
  numbered rows first in bands of `band` clusters' rows, so that the 66 pairs of an H100 work on 8
  row groups of 256 (17 MB of `x`, which stay in the L2) and 8 tiles of `weight` (17 MB), which go
  by once a band: 4 bands read `weight` 4 times, 1.3 ms of memory time under 11 ms of arithmetic.
- Hence a block comes back to a row with other columns in between. Each cluster keeps the running
  statistics of every row in a row of its own of a float32 array, 16 or 20 bytes a token a cluster
  (8.7 MB at the shape above; in the L2), loaded before the steps of a tile and stored after. XLA
  combines the clusters.
- Taking statistics is four instructions an element: maximum, one fma that scales by log2(e) and
  subtracts the maximum, exp2, add. exp2 is the slow one, 16 a clock and multiprocessor: 2048 clocks
  against the 65536 of the tile's multiplications. Comparing columns with the label would double it,
  so that happens only in tiles with a label of one of the warpgroup's 64 rows, which a table says:
  one in eight at the shape above.

TMA fills in zeros for rows past T and V; no result is kept of the former, and logits of the latter
are lowered to -inf before anything is taken from them. Running maxima start at -1e30, not at -inf,
whose difference with itself is NaN, so logits of -inf count as nothing; -inf is put back at the
end. Logits are therefore taken to be -inf or above -1e30.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.linear_cross_entropy.token_loss import LogitStatistics
from pallas_kernels.mosaic_gpu import Device, load, store, target_device

_TILE_M = 64  # of a warpgroup, what wgmma has
_WARPGROUPS = 2  # that compute
_BLOCK_M = _WARPGROUPS * _TILE_M
_TILE_K = 64  # 128 bytes, the widest swizzle
_DTYPES = (jnp.bfloat16, jnp.float16)

# Of 65536 registers the memory warpgroup keeps 40 a lane; the others can have 240.
_MEMORY_REGISTERS = 40
_COMPUTE_REGISTERS = 232

_LOWEST = -1e30
_LOG2_E = math.log2(math.e)

_TILE = plgpu.Layout.WGMMA
_ROW = plgpu.Layout.WGMMA.reduce(1)  # a value for each row of a tile
_COLUMN = plgpu.Layout.WGMMA.reduce(0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """How the logits are dealt to blocks and what a block keeps in shared memory.

    Attributes:
      tile_n: columns of a tile, a multiple of 64 up to 256.
      stages: steps of 64 in D whose operands shared memory holds.
      in_flight: wgmma steps that may run while the next is issued, 0 or 1.
      lead: steps that the first warpgroup is ahead of the second, below `stages`; 0 leaves it to
        chance.
      cluster: blocks that share tiles of `weight`, 1 or 2.
      band: row groups (of `128 · cluster` rows) that go through the vocabulary together.
      blocks: thread blocks, a multiple of `cluster`.
    """

    tile_n: int
    stages: int
    in_flight: int
    lead: int
    cluster: int
    band: int
    blocks: int

    def __post_init__(self):
        if self.tile_n % 64 or not 64 <= self.tile_n <= 256:
            raise ValueError(f"{self.tile_n=} must be a multiple of 64 from 64 to 256")
        if self.in_flight not in (0, 1):
            raise ValueError(f"{self.in_flight=} must be 0 or 1")
        if self.stages < 2:
            raise ValueError(f"{self.stages=} must be at least 2")
        if not 0 <= self.lead < self.stages:
            raise ValueError(f"{self.lead=} must be from 0 to {self.stages - 1}")
        if self.cluster not in (1, 2):
            raise ValueError(f"{self.cluster=} must be 1 or 2")
        if self.band < 1:
            raise ValueError(f"{self.band=} must be at least 1")
        if self.blocks < 1 or self.blocks % self.cluster:
            raise ValueError(f"{self.blocks=} must be a positive multiple of {self.cluster=}")


def default_config(num_tokens: int, vocab_size: int, hidden_size: int, device: Device) -> Config:
    """The launch parameters to use: derived, not measured."""
    tile_n = 256 if vocab_size > 128 else 128
    cluster = 2 if num_tokens > _BLOCK_M and device.num_sms % 2 == 0 else 1
    groups = pl.cdiv(num_tokens, cluster * _BLOCK_M)
    tiles = groups * pl.cdiv(vocab_size, tile_n)
    # 16 MiB of `x`, a third of the L2 of an H100. Bands of equal size, because tiles of a narrow
    # last one would share less.
    group_bytes = 2 * cluster * _BLOCK_M * hidden_size
    bands = pl.cdiv(groups, max(1, 2**24 // group_bytes))
    return Config(
        tile_n=tile_n,
        stages=4 if tile_n == 256 else 6,
        in_flight=1,
        lead=0,
        cluster=cluster,
        band=pl.cdiv(groups, bands),
        blocks=cluster * min(device.num_sms // cluster, tiles),
    )


def unsupported_reason(x: jax.Array, weight: jax.Array) -> str | None:
    """Why the kernel cannot run these arguments on the default device, or None if it can."""
    device = target_device()
    if device.capability is not None and device.capability[0] != 9:
        return f"wgmma needs compute capability (9, x), {device.kind} has {device.capability}"
    if x.dtype not in _DTYPES or weight.dtype != x.dtype:
        return f"x and weight are {x.dtype} and {weight.dtype}, not both bfloat16 or float16"
    if 0 in (*x.shape, *weight.shape):
        return f"x and weight of shapes {x.shape} and {weight.shape} make no logits"
    return None


def linear_statistics(
    x: Float[Array, "T D"],
    weight: Float[Array, "V D"],
    bias: Float[Array, " V"] | None,
    labels: Int[Array, " T"],
    *,
    softcap: float | None,
    first_column: Int[Array, ""] | int = 0,
    with_total: bool = False,
    config: Config | None = None,
) -> LogitStatistics:
    """Statistics of `z = x @ weight.T + bias`, or of `softcap · tanh(z / softcap)`, in float32.

    Args:
      x: bfloat16 or float16.
      weight: rows of the embedding, of the dtype of `x`.
      bias: added in float32.
      labels: column of each token in the whole vocabulary; may be any number.
      softcap: c of `c · tanh(z / c)`.
      first_column: number in the whole vocabulary of the first row of `weight`.
      with_total: whether the sum of the logits is computed.
      config: launch parameters; chosen if None.

    Raises:
      NotImplementedError: `unsupported_reason` has one.
      ValueError: the configuration does not fit the device.
    """
    if (reason := unsupported_reason(x, weight)) is not None:
        raise NotImplementedError(f"implementation='mosaic_gpu': {reason}")
    num_tokens, hidden_size = x.shape
    vocab_size = weight.shape[0]
    device = target_device()
    if config is None:
        config = default_config(num_tokens, vocab_size, hidden_size, device)
    num_bytes = 2 * config.stages * (_BLOCK_M + config.tile_n) * _TILE_K
    if num_bytes > device.smem_bytes:
        raise ValueError(
            f"{config} takes {num_bytes} bytes of shared memory, a block of {device.kind} can "
            f"have {device.smem_bytes}; use less stages"
        )
    groups = pl.cdiv(num_tokens, config.cluster * _BLOCK_M)
    padding = groups * config.cluster * _BLOCK_M - num_tokens
    labels = jnp.pad(labels - jnp.asarray(first_column, labels.dtype), (0, padding))
    label_tile = jnp.where(labels < 0, -1, labels // config.tile_n).reshape(-1, _TILE_M)
    vocab_tiles = pl.cdiv(vocab_size, config.tile_n)
    has_label = jnp.any(label_tile[..., None] == jnp.arange(vocab_tiles), axis=1)
    if bias is not None:
        bias = bias.astype(jnp.float32)
        bias = jnp.pad(bias, (0, vocab_tiles * config.tile_n - vocab_size))
    running = _running_statistics(
        _whole_tiles(x),
        _whole_tiles(weight),
        bias,
        labels,
        has_label,
        vocab_size,
        softcap=softcap,
        with_total=with_total,
        config=config,
    )
    largest, sum_exp, label_logit, largest_before, *total = running[..., :num_tokens]
    lowest_to_inf = lambda a: jnp.where(a == _LOWEST, -jnp.inf, a)
    # Relative to _LOWEST where every logit is -inf; the sum is 0 then.
    top = jnp.max(largest, axis=0)
    lse = top + jnp.log(jnp.sum(sum_exp * jnp.exp(largest - top), axis=0))
    return LogitStatistics(
        lse=lse,
        label_logit=lowest_to_inf(jnp.max(label_logit, axis=0)),
        largest=lowest_to_inf(top),
        largest_before=lowest_to_inf(jnp.max(largest_before, axis=0)),
        total=jnp.sum(total[0], axis=0) if with_total else jnp.zeros_like(lse),
    )


def _whole_tiles(a: Float[Array, "N D"]) -> Float[Array, "padded_N padded_D"]:
    """Padded with zeros to the 8 rows by 64 that TMA swizzles together.

    Mosaic has no copies of parts of these. It is no copy for the sizes of the usual models.
    """
    return jnp.pad(a, ((0, -a.shape[0] % 8), (0, -a.shape[1] % _TILE_K)))


# Where the running statistics start: largest, sum of exp, label_logit, largest_before, total.
_START = (_LOWEST, 0.0, _LOWEST, _LOWEST, 0.0)


def _running_statistics(
    x: Float[Array, "some_T padded_D"],
    weight: Float[Array, "some_V padded_D"],
    bias: Float[Array, " padded_V"] | None,
    labels: Int[Array, " padded_T"],
    has_label: Bool[Array, "row_tiles vocab_tiles"],
    vocab_size: int,
    *,
    softcap: float | None,
    with_total: bool,
    config: Config,
) -> Float[Array, "statistics clusters padded_T"]:
    """The statistics, in the order of `_START`, of the tiles that each cluster had."""
    padded_tokens = labels.size
    tile_n, stages, cluster = config.tile_n, config.stages, config.cluster
    groups = padded_tokens // (cluster * _BLOCK_M)
    vocab_tiles = pl.cdiv(vocab_size, tile_n)
    num_tiles = groups * vocab_tiles
    num_clusters = config.blocks // cluster
    k_steps = x.shape[1] // _TILE_K
    # In shorter tiles the first warpgroup could be more than a tile ahead.
    lead = min(config.lead, k_steps) if k_steps >= stages else 0
    starts = _START if with_total else _START[:-1]
    has_bias = bias is not None
    accumulator = plgpu.WGMMAAccumulatorRef((_TILE_M, tile_n), jnp.float32)

    def kernel(*refs):
        x_gmem, weight_gmem, labels_gmem, has_label_gmem, *refs = refs
        bias_gmem, *refs = refs if has_bias else (None, *refs)
        running_gmem, x_smem, weight_smem, filled, freed, *ahead = refs
        group_of_blocks, member = jax.lax.axis_index("group"), jax.lax.axis_index("member")
        warpgroup = jax.lax.axis_index("warpgroup")
        tiles_here = jax.lax.div(num_tiles + num_clusters - 1 - group_of_blocks, num_clusters)
        slot_of = lambda step: jax.lax.rem(step, stages)

        def place(i):
            """First row and column of the i-th tile of this block."""
            tile = group_of_blocks + i * num_clusters
            # Every other band goes through the vocabulary backwards, over what is in the L2.
            group, vocab_tile = plgpu.planar_snake(tile, (groups, vocab_tiles), 0, config.band)
            return (group * cluster + member) * _BLOCK_M, vocab_tile * tile_n

        @pl.when(warpgroup == _WARPGROUPS)
        def _bring_operands():
            plgpu.set_max_registers(_MEMORY_REGISTERS, action="decrease")

            def bring_tile(i, step):
                row, column = place(i)

                def bring(k, step):
                    slot = slot_of(step)

                    @pl.when(step >= stages)
                    def _wait():
                        plgpu.barrier_wait(freed.at[slot])

                    depth = pl.ds(k * _TILE_K, _TILE_K)
                    plgpu.copy_gmem_to_smem(
                        x_gmem.at[pl.ds(row, _BLOCK_M), depth], x_smem.at[slot], filled.at[slot]
                    )
                    plgpu.copy_gmem_to_smem(
                        weight_gmem.at[pl.ds(column, tile_n), depth],
                        weight_smem.at[slot],
                        filled.at[slot],
                        collective_axes="member" if cluster > 1 else None,
                    )
                    return step + 1

                return jax.lax.fori_loop(0, k_steps, bring, step)

            steps = jax.lax.fori_loop(0, tiles_here, bring_tile, 0)
            # The other block of the cluster must not free a slot of one that is gone.
            jax.lax.fori_loop(
                jnp.maximum(steps - stages, 0),
                steps,
                lambda step, _: plgpu.barrier_wait(freed.at[slot_of(step)]),
                None,
            )

        @pl.when(warpgroup < _WARPGROUPS)
        def _compute():
            plgpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
            own_rows = pl.ds(warpgroup * _TILE_M, _TILE_M)

            def running_at(statistic, row):
                rows = pl.ds(row + warpgroup * _TILE_M, _TILE_M)
                return running_gmem.at[statistic, group_of_blocks, rows]

            def start_group(group, _):
                row = (group * cluster + member) * _BLOCK_M
                for i, start in enumerate(starts):
                    store(running_at(i, row), _filled(start, (_TILE_M,), _ROW))

            jax.lax.fori_loop(0, groups, start_group, None)

            def multiply(acc, step):
                slot = slot_of(step)
                plgpu.barrier_wait(filled.at[slot])
                plgpu.wgmma(
                    acc,
                    x_smem.at[slot, own_rows],
                    weight_smem.at[slot].transpose((1, 0)),
                )

            def compute_tile(i, first_step):
                row, column = place(i)
                # On their way during the multiplications.
                running = [load(running_at(i, row), _ROW) for i in range(len(starts))]
                label = load(labels_gmem.at[pl.ds(row + warpgroup * _TILE_M, _TILE_M)], _ROW)
                label_here = has_label_gmem[
                    jax.lax.div(row, _TILE_M) + warpgroup, jax.lax.div(column, tile_n)
                ]

                def multiply_all(acc):
                    def next_step(step, _):
                        multiply(acc, step)
                        plgpu.wgmma_wait(config.in_flight)
                        plgpu.barrier_arrive(freed.at[slot_of(step - config.in_flight)])

                    if lead:
                        # The second waits until the first has issued `lead` steps of this tile.
                        @pl.when(warpgroup == 1)
                        def _wait():
                            plgpu.barrier_wait(ahead[0])

                    start = first_step
                    if config.in_flight:
                        multiply(acc, start)
                        start += 1
                    if lead:
                        jax.lax.fori_loop(start, first_step + lead, next_step, None)
                        start = first_step + lead

                        @pl.when(warpgroup == 0)
                        def _arrive():
                            plgpu.barrier_arrive(ahead[0])

                    jax.lax.fori_loop(start, first_step + k_steps, next_step, None)
                    logits = acc[...]
                    if config.in_flight:
                        plgpu.barrier_arrive(freed.at[slot_of(first_step + k_steps - 1)])
                    return logits

                logits = pl.run_scoped(multiply_all, accumulator)
                if bias_gmem is not None:
                    values = load(bias_gmem.at[pl.ds(column, tile_n)], _COLUMN)
                    logits += jax.lax.broadcast_in_dim(values, logits.shape, (1,))
                if softcap is not None:
                    logits = softcap * _tanh(logits * (1 / softcap))
                # Of the vocabulary in this tile, or more; None if all tiles are full.
                num_columns = vocab_size - column if vocab_size % tile_n else None
                running = _with_tile(running, logits, label - column, label_here != 0, num_columns)
                for i, value in enumerate(running):
                    store(running_at(i, row), value)
                return first_step + k_steps

            jax.lax.fori_loop(0, tiles_here, compute_tile, 0)

    scratch = [
        plgpu.SMEM((stages, _BLOCK_M, _TILE_K), x.dtype),
        plgpu.SMEM((stages, tile_n, _TILE_K), x.dtype),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=stages)
        if cluster == 1
        else plgpu.ClusterBarrier(
            collective_axes=("member",), num_arrivals=_WARPGROUPS, num_barriers=stages
        ),
    ]
    if lead:
        scratch.append(plgpu.Barrier())
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((len(starts), num_clusters, padded_tokens), jnp.float32),
        grid=(num_clusters,),
        grid_names=("group",),
        cluster=(cluster,),
        cluster_names=("member",),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        scratch_types=scratch,
        kernel_name="linear_statistics",
        # exp2 is then one instruction; else three more serve results below 1e-38.
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(x, weight, labels, has_label.astype(jnp.int32), *((bias,) if has_bias else ()))


def _with_tile(running, logits, label, label_here, num_columns):
    """The running statistics with those of a tile.

    Args:
      running: as in `_START`.
      logits: of the tile.
      label: of each row, counted from the tile's first column.
      label_here: whether a label may be one of the tile's columns.
      num_columns: how many columns of the vocabulary are left for this tile, None for enough.
    """
    tile_n = logits.shape[1]
    to_tile = lambda row: jax.lax.broadcast_in_dim(row, logits.shape, (0,))
    columns = lambda: plgpu.broadcasted_iota(jnp.int32, logits.shape, 1, layout=_TILE)
    lowest = lambda: _filled(_LOWEST, logits.shape, _TILE)

    def without(logits, fill):
        """The logits with `fill` where the vocabulary is over."""
        if num_columns is None:
            return logits
        return jax.lax.cond(
            num_columns < tile_n,
            lambda: jnp.where(columns() < num_columns, logits, _filled(fill, logits.shape, _TILE)),
            lambda: logits,
        )

    largest, sum_exp, label_logit, largest_before, *total = running
    if total:
        total = [total[0] + jnp.sum(without(logits, 0.0), axis=1)]
    logits = without(logits, -jnp.inf)
    tile_largest = jnp.max(logits, axis=1)

    def with_label():
        at_label = jnp.where(columns() == to_tile(label), logits, lowest())
        before = jnp.where(columns() < to_tile(label), logits, lowest())
        return jnp.max(at_label, axis=1), jnp.max(before, axis=1)

    def without_label():
        none = _filled(_LOWEST, label.shape, _ROW)
        return none, jnp.where(label >= tile_n, tile_largest, none)

    at_label, before = jax.lax.cond(label_here, with_label, without_label)
    new_largest = jnp.maximum(largest, tile_largest)
    # Not as below: of -1e30 the fma would leave the rounding error of the product.
    sum_exp *= jnp.exp2((largest - new_largest) * _LOG2_E)
    offset = to_tile(new_largest * _LOG2_E)
    sum_exp += jnp.sum(jnp.exp2(logits * _LOG2_E - offset), axis=1)
    return [
        new_largest,
        sum_exp,
        jnp.maximum(label_logit, at_label),
        jnp.maximum(largest_before, before),
        *total,
    ]


def _tanh(x):
    """tanh by exp2: an error of 1e-7 of the largest value, a fifth of the instructions."""
    return 1 - 2 / (jnp.exp2(x * (2 * _LOG2_E)) + 1)


def _filled(value: float, shape: tuple[int, ...], layout) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
