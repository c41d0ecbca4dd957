"""Chooses the program that computes the loss; no other module chooses.

`choose` takes what is known before anything runs (sizes, dtypes, options, device, whether the
vocabulary is split) and returns one of four plans with the reason for it:

- `AllLogits`: all logits in float32, differentiated by JAX. `implementation="reference"`.
- `TokenChunks`: all columns of some tokens at a time.
- `ColumnChunks`: all tokens of some columns at a time.
- `InPlace`: the memory of `dweight` holds the exponentials of all tokens, or of the first ones.

Where the caller does not choose, the plan with the least estimated time (`cost.py`) runs, of those
whose logits the limit allows. `docs/kernels/loss.md` compares the plans.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.folding import even_chunk_size
from pallas_kernels.gpu.device import target_device
from pallas_kernels.gpu.hopper_gemm import Operand
from pallas_kernels.implementation import Chosen
from pallas_kernels.loss import cost
from pallas_kernels.loss.config import Config
from pallas_kernels.loss.counted import num_rows
from pallas_kernels.loss.layout import WeightLayout, column_axis, padding, sizes
from pallas_kernels.loss.low_rank import TwoParts
from pallas_kernels.loss.mosaic_gpu import exponentials, in_place
from pallas_kernels.loss.mosaic_gpu.logits_config import LINE
from pallas_kernels.loss.token_loss import LossOptions

# Most bytes of the logits of a chunk, in 16 bits, unless the caller gives a limit. At V = 128256,
# 2048 tokens have 501 MiB. There, at D = 2048 on an H100 (2026-11-21), chunks of 4096 save 2 %.
_LOGITS_BYTES = 512 * 2**20
_TILE = 128  # tokens or columns of a tile of the GEMMs
# A plan that takes all of the limit counts as 1 % slower, so that a tie goes to less memory. With
# 2 %, 8192 x 2304 x 256000 (H100) with 1 GiB took chunks of 1792 after 4608 tokens in place: 1.130
# of three GEMMs, where chunks of 2048 take 1.042.
_COST_OF_LIMIT = 0.01
_MOST_SIZES = 128  # chunk sizes that are compared, which takes about 2 ms
# Memory of the exponentials that are copied out of `dweight` (in_place.py). It holds 48 blocks of
# 128 rows of a float32 `dweight` at D = 4096. V = 128256 has 1002 blocks: 29 bands of 33, which
# have 4 tiles for each of the 132 multiprocessors of an H100, and 45 that are copied.
_COPIED_BYTES = 96 * 2**20


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Static settings of a program that do not depend on its plan.

    Attributes:
      options: Options of the loss.
      implementation: Code that makes losses and gradients from logits.
      accum_dtype: Dtype in which chunks of tokens add up `dweight`.
      weight_layout: Layout of the weight and of its gradient.
      vocab_axes: Mesh axes over which the vocabulary is split; in a request for whole arrays, the
        axes of a `jax.shard_map` around it.
      config: Launch parameters.
    """

    options: LossOptions
    implementation: Chosen
    accum_dtype: jnp.dtype
    weight_layout: WeightLayout
    vocab_axes: tuple[str, ...]
    config: Config

    @property
    def column_axis(self) -> int:
        """The axis of weight and bias whose entries are columns of the logits."""
        return column_axis(self.weight_layout)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """Everything that the plan depends on.

    Attributes:
      settings: Static settings of the program.
      x: Hidden states `[T, D]`, or their shape and dtype.
      weight: Output embedding, or its shape and dtype; this device's part of a split one.
      has_bias: Whether the logits have a bias.
      is_low_rank: Whether a part of the weight is frozen, and only a low-rank part has a gradient.
      chunk_size: Tokens of a chunk that the caller asks for.
      vocab_chunk_size: Columns of a chunk that the caller asks for.
      max_logits_bytes: Limit that the caller sets for logits in memory.
      counted_fraction: Largest share of the tokens that the caller expects to count.
    """

    settings: Settings
    x: Operand
    weight: Operand
    has_bias: bool
    is_low_rank: bool
    chunk_size: int | None
    vocab_chunk_size: int | None
    max_logits_bytes: int | None
    counted_fraction: float

    def on_device(
        self, x: Operand, weight: Operand | TwoParts, vocab_axes: tuple[str, ...]
    ) -> "Request":
        """The request for a device's tokens and columns; `weight` may be rounded already."""
        return dataclasses.replace(
            self,
            settings=dataclasses.replace(self.settings, vocab_axes=vocab_axes),
            x=jax.ShapeDtypeStruct(x.shape, x.dtype),
            weight=jax.ShapeDtypeStruct(weight.shape, self.weight.dtype),
        )

    @property
    def of_counted(self) -> "Request":
        """The request for the rows of the tokens that are expected to count.

        The plain formula and the devices of a split vocabulary compute all tokens.
        """
        if self.settings.vocab_axes or self.settings.implementation == "reference":
            return self
        rows = num_rows(len(self.x), self.counted_fraction)
        x = jax.ShapeDtypeStruct((rows, *self.x.shape[1:]), self.x.dtype)
        return dataclasses.replace(self, x=x)

    @property
    def sizes(self) -> tuple[int, int]:
        """`(V, D)`."""
        return sizes(self.weight, self.settings.weight_layout)

    @property
    def operand(self) -> jax.ShapeDtypeStruct:
        """The weight as the GEMMs take it, in the dtype of `x`."""
        return jax.ShapeDtypeStruct(self.weight.shape, self.x.dtype)

    @property
    def padded_vocab_size(self) -> int:
        """V of the weight with whole blocks of 128, as the kernels take it."""
        vocab_size, _ = self.sizes
        return vocab_size + padding(vocab_size)

    @property
    def logits_dtype(self) -> jnp.dtype:
        """Dtype of logits in memory."""
        is_kernel = self.settings.implementation == "mosaic_gpu"
        return jnp.dtype(self.x.dtype if is_kernel else jnp.float32)

    @property
    def bytes_of_logit(self) -> int:
        """Bytes of a logit in memory.

        With a low-rank update it is the sum of two products. Unless the GEMM stores exponentials,
        the sum is float32 at first, which takes 4 bytes more for logits of 16 bits.
        """
        itemsize = self.logits_dtype.itemsize
        has_sum = self.is_low_rank and not _stores_exponentials(self)
        return itemsize + 4 if has_sum and itemsize < 4 else itemsize


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class AllLogits:
    """All logits in float32, differentiated by JAX."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TokenChunks:
    """All columns of some tokens at a time: three GEMMs, and a sum of `dweight` over chunks.

    Attributes:
      chunk_size: Tokens of a chunk, at most.
      by_exponentials: Whether the GEMM of the logits stores their exponentials (exponentials.py).
    """

    chunk_size: int
    by_exponentials: bool

    @property
    def without_dweight(self) -> "TokenChunks":
        """The same plan: only `InPlace` needs another one where the weight has no gradient."""
        return self


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ColumnChunks:
    """All tokens of some columns at a time: four GEMMs, and no sum of `dweight`.

    Attributes:
      num_columns: Columns of a chunk, at most.
      by_exponentials: Whether the GEMM of the logits stores dlogits (exponentials.py).
    """

    num_columns: int
    by_exponentials: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class InPlace:
    """Exponentials in the memory of `dweight`: three GEMMs, and no or few sums.

    Attributes:
      extent: Tokens that are done at once, and how their part of `dweight` is made.
      chunk_size: Tokens of the chunks that follow, all full; None if none follow.
      without_dweight: Plan for a call in which the weight has no gradient, and so no memory.
    """

    extent: in_place.Extent
    chunk_size: int | None
    without_dweight: TokenChunks

    by_exponentials = True


type Plan = AllLogits | TokenChunks | ColumnChunks | InPlace


class Choice(NamedTuple):
    """A plan, and one sentence that says why it was chosen."""

    plan: Plan
    reason: str


def choose(request: Request) -> Choice:
    """The plan for a call."""
    if request.settings.implementation == "reference":
        return Choice(AllLogits(), "The reference implementation keeps all logits.")
    if request.vocab_chunk_size is not None:
        return Choice(
            _column_chunks(request, request.vocab_chunk_size),
            f"The caller asks for vocab_chunk_size={request.vocab_chunk_size}.",
        )
    if request.chunk_size is not None:
        return Choice(
            _token_chunks(request, request.chunk_size),
            f"The caller asks for chunk_size={request.chunk_size}.",
        )
    found, refused = candidates(request)
    limit = limit_of(request)
    allowed = [c for c in found if c.num_bytes <= limit] or found
    best = min(allowed, key=lambda c: weighted(c.seconds, c.num_bytes, limit))
    reason = (
        f"The estimate for an H100, {1e3 * best.seconds:.3g} ms, is the least of {len(allowed)} "
        f"plans with at most {limit / 2**20:.4g} MiB of logits"
    )
    if best.num_bytes > limit:
        reason += f" or {_TILE} tokens in a chunk"
    if refused is not None:
        reason += f"; dweight's memory cannot hold exponentials: {refused}"
    return Choice(best.plan, f"{reason}.")


class Candidate(NamedTuple):
    """A plan that the limit allows, its estimated time, and the bytes of its logits.

    The bytes do not count copies of exponentials that were in the memory of `dweight`.
    """

    plan: TokenChunks | InPlace
    seconds: float
    num_bytes: int


def candidates(request: Request) -> tuple[list[Candidate], str | None]:
    """The plans that `choose` chooses from, and why none is in place if none is.

    Chunks of columns are not among them. They would be faster than short chunks of tokens. But XLA
    copies the weight for them if the caller has widened it to float32. With a limit of 32 MiB they
    took 1.1 to 2.5 GiB, and 1.76 to 2.16 times the three GEMMs (H100, D from 2048 to 4096, more
    than 2 D tokens).
    """
    num_tokens, bytes_of_token = len(request.x), request.bytes_of_logit * request.sizes[0]
    fitting = min(limit_of(request) // bytes_of_token, num_tokens + -num_tokens % _TILE)
    num_tiles = max(1, fitting // _TILE)
    step = math.ceil(num_tiles / _MOST_SIZES)
    chunk_sizes = [_TILE * n for n in range(num_tiles, 0, -step)]
    even = sorted({even_chunk_size(num_tokens, size) for size in chunk_sizes})
    chunks = [_token_chunks(request, size) for size in even]
    in_chunks = min(chunks, key=lambda plan: seconds(request, plan))
    places, refused = _in_place(request, chunk_sizes)
    found = [Candidate(p, seconds(request, p), p.chunk_size * bytes_of_token) for p in chunks]
    for extent, size in places:
        plan = InPlace(extent=extent, chunk_size=size, without_dweight=in_chunks)
        num_bytes = (size or extent.num_beside) * bytes_of_token
        found.append(Candidate(plan, seconds(request, plan), num_bytes))
    return found, refused


def seconds(
    request: Request, plan: TokenChunks | InPlace, rates: cost.Rates = cost.H100_RATES
) -> float:
    """The estimated time of a loss with its gradients."""
    result, total = request.weight.dtype.itemsize, request.settings.accum_dtype.itemsize
    of_all_plans = cost.Sizes(
        hidden_size=request.sizes[1],
        vocab_size=request.padded_vocab_size,
        weight_layout=request.settings.weight_layout,
        result_bytes=0 if request.is_low_rank else result,
        sum_bytes=0 if request.is_low_rank else total,
    )
    if isinstance(plan, TokenChunks):
        return cost.of_chunks(of_all_plans, len(request.x), plan.chunk_size, rates)
    return cost.of_in_place(of_all_plans, len(request.x), plan.extent, plan.chunk_size, rates)


def weighted(seconds: float, num_bytes: int, limit: int) -> float:
    """The number that `choose` minimizes: a tie goes to the plan with less memory."""
    return seconds * (1 + _COST_OF_LIMIT * num_bytes / limit)


def limit_of(request: Request) -> int:
    """Bytes of logits that a plan may have in memory."""
    by_default = _LOGITS_BYTES * request.bytes_of_logit // 2
    return by_default if request.max_logits_bytes is None else request.max_logits_bytes


def _stores_exponentials(request: Request) -> bool:
    """Whether the GEMM of the logits of a chunk of tokens stores their exponentials.

    On a split vocabulary the softmax needs the sums of all devices, which come after the GEMM.
    """
    return not request.settings.vocab_axes and _no_exponentials(request) is None


def _token_chunks(request: Request, chunk_size: int) -> TokenChunks:
    return TokenChunks(chunk_size=chunk_size, by_exponentials=_stores_exponentials(request))


def _column_chunks(request: Request, num_columns: int) -> ColumnChunks:
    settings = request.settings
    if settings.implementation == "mosaic_gpu" and settings.weight_layout == "dv":
        # The GEMMs read parts of [D, V] in whole lines. With other parts, logits would lie in
        # memory, in 16 bits.
        num_columns = max(LINE, num_columns // LINE * LINE)
    by_exponentials = _no_exponentials(request) is None
    return ColumnChunks(num_columns=num_columns, by_exponentials=by_exponentials)


def _no_exponentials(request: Request) -> str | None:
    """Why the GEMM of the logits cannot store exponentials, or None if it can."""
    if request.settings.implementation != "mosaic_gpu":
        return "only kernels store exponentials"
    if request.has_bias:
        return "the logits have a bias"
    settings = request.settings
    return exponentials.unsupported_reason(
        request.x, request.operand, settings.options, settings.weight_layout
    )


def _in_place(
    request: Request, chunk_sizes: Sequence[int]
) -> tuple[list[tuple[in_place.Extent, int | None]], str | None]:
    """Extents and the sizes of the chunks after them, or why nothing can be in place.

    `dweight` has the dtype of the weight if there is no sum over chunks. Otherwise it has the dtype
    of the sum until it is rounded.

    Args:
      request: The call.
      chunk_sizes: Numbers of tokens whose exponentials may be in other memory.
    """
    num_tokens, (_, hidden_size) = len(request.x), request.sizes
    if request.is_low_rank:
        reason = "the weight is frozen, and the gradient of its low-rank update has no such memory"
        return [], reason
    if request.settings.vocab_axes:
        return [], "the vocabulary is split over devices"
    if (reason := _no_exponentials(request)) is not None:
        return [], reason
    accum_dtype, layout = request.settings.accum_dtype, request.settings.weight_layout
    found, reason = [], f"{num_tokens} tokens are too many for the limit"
    for dtype in dict.fromkeys((request.weight.dtype, accum_dtype)):
        width = in_place.row_width(hidden_size, dtype)
        refused = in_place.unsupported_reason(request.x, request.operand, dtype, layout)
        if refused is not None:
            reason = refused
            continue
        bands, rest = _bands(request, dtype), num_tokens - width
        if rest <= max(chunk_sizes):
            inside = min(num_tokens, width)
            found.append((in_place.Extent(inside, num_tokens - inside, dtype, bands), None))
        if rest <= 0 or dtype != accum_dtype:
            continue
        for size in chunk_sizes:
            num_chunks = math.ceil(rest / size)
            num_inside = num_tokens - num_chunks * size
            if num_chunks > 1 and num_inside > 0:
                found.append((in_place.Extent(num_inside, 0, dtype, bands), size))
    return found, None if found else reason


def _bands(request: Request, dtype: jnp.dtype) -> in_place.Bands:
    """Bands of vocabulary entries in which `dweight` is made.

    At the end of a band all multiprocessors wait for the last one. So the bands with the least
    estimated time are few, and leave few multiprocessors without work at their ends. There are no
    bands if the exponentials of all rows may be copied.
    """
    layout, hidden_size = request.settings.weight_layout, request.sizes[1]
    vocab_size = request.padded_vocab_size
    limit = request.max_logits_bytes
    max_bytes = _COPIED_BYTES if limit is None else min(limit, _COPIED_BYTES)
    device = target_device()
    block = in_place.columns_of_block(layout)
    num_blocks = vocab_size // block
    most = max(1, max_bytes // (2 * in_place.row_width(hidden_size, dtype) * block))
    candidates = []
    for size in range(1, most + 1):
        number = num_blocks // size - 1
        num_copied = num_blocks - number * size
        if number >= 2 and num_copied <= most:
            bands = in_place.Bands(block * size, number, block * num_copied)
            time = in_place.time_of_bands(bands, hidden_size, layout, device)
            candidates.append((time, bands.num_copied, bands))
    if num_blocks <= most or not candidates:
        return in_place.Bands(vocab_size, 0, 0)
    return min(candidates)[-1]
