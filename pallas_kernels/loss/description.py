"""A plan as a printable value: its products, its memory and the reason for it."""

import dataclasses
import math

from pallas_kernels.folding import even_chunk_size
from pallas_kernels.gpu.hopper_gemm import BLOCK_M
from pallas_kernels.implementation import Chosen
from pallas_kernels.loss.layout import padding
from pallas_kernels.loss.mosaic_gpu import in_place, linear_launch
from pallas_kernels.loss.plan import (
    AllLogits,
    ColumnChunks,
    InPlace,
    Request,
    TokenChunks,
    choose,
)

_MIB = 2**20


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossPlan:
    """The plan of `linear_cross_entropy` for some shapes; `str` makes a text to print.

    A plan decides which part of the logits is in memory at a time. Products are matrix products of
    `2·T·D·V` FLOPs. "With gradients" means the gradients of both `x` and `weight`. A plan does not
    know whether a program takes both: with a frozen weight it has fewer products. Memory is in
    bytes on each device. It counts logits, or the exponentials that some plans keep in place of
    logits. It counts neither arguments nor results.

    Attributes:
      name: `"all logits"`, `"token chunks"`, `"column chunks"` or `"in place"`.
      implementation: `"reference"`, `"xla"` or `"mosaic_gpu"`.
      why_no_kernel: Reason why the kernels do not run; None if they do.
      reason: One sentence that says why this plan was chosen.
      num_products: Products of a loss with gradients.
      num_products_alone: Products of a loss without gradients.
      num_chunks: Number of chunks, one after the other; 1 if nothing is split. `"in place"` counts
        the tokens whose exponentials are in `dweight`'s memory as one.
      chunk_size: Tokens of a chunk; all tokens where chunks are of columns.
      num_columns: Columns of a chunk; all columns where chunks are of tokens.
      logits_bytes: Logits or exponentials in memory at a time, with gradients.
      logits_bytes_alone: Logits in memory at a time, without gradients.
      bytes_in_dweight: Exponentials in the memory that `dweight` takes later.
    """

    name: str
    implementation: Chosen
    why_no_kernel: str | None
    reason: str
    num_products: int
    num_products_alone: int
    num_chunks: int
    chunk_size: int
    num_columns: int
    logits_bytes: int
    logits_bytes_alone: int
    bytes_in_dweight: int

    def __str__(self) -> str:
        products = f"{self.num_products} matrix products with all gradients"
        memory = f"{self.logits_bytes / _MIB:.1f} MiB of logits or exponentials with gradients, "
        if self.bytes_in_dweight:
            memory += f"{self.bytes_in_dweight / _MIB:.1f} MiB more in the memory of dweight, "
        chunks = f"{self.num_chunks} x ({self.chunk_size} tokens x {self.num_columns} columns)"
        lines = [
            f"{self.name}, implementation={self.implementation!r}",
            f"  {products}, {self.num_products_alone} without gradients",
            f"  {memory}{self.logits_bytes_alone / _MIB:.1f} MiB without",
            f"  chunks: {chunks}",
            f"  why: {self.reason}",
        ]
        if self.why_no_kernel is not None:
            lines.append(f"  no kernel: {self.why_no_kernel}")
        return "\n".join(lines)


def describe(request: Request, why_no_kernel: str | None, num_products: int) -> LossPlan:
    """The description of the plan that `choose` has for the call.

    A plan that splits tokens takes `num_products` with gradients: 3 if the forward knows the
    cotangents, or 4 if the backward computes the logits again. Other plans have their own number.
    """
    all_tokens, request = len(request.x), request.of_counted
    plan, reason = choose(request)
    if len(request.x) < all_tokens:
        reason += (
            f" These are the {len(request.x)} rows for the tokens that count, of {all_tokens}. If "
            "more count, all are computed by a second plan."
        )
    num_tokens, (vocab_size, hidden_size) = len(request.x), request.sizes
    settings = request.settings
    itemsize = request.bytes_of_logit
    is_kernel = settings.implementation == "mosaic_gpu"
    padded = lambda n: n + padding(n) if is_kernel else n
    num_chunks, tokens, columns, in_dweight = 1, num_tokens, vocab_size, 0
    match plan:
        case AllLogits():
            name, num_products = "all logits", 3
            num_bytes = alone = num_tokens * vocab_size * itemsize
        case TokenChunks(chunk_size=size):
            name = "token chunks"
            tokens = min(even_chunk_size(num_tokens, size), num_tokens)
            num_chunks = math.ceil(num_tokens / tokens) if tokens else 1
            num_bytes = alone = tokens * padded(vocab_size) * itemsize
        case ColumnChunks(num_columns=size):
            name, num_products = "column chunks", 4
            columns = min(even_chunk_size(vocab_size, size), vocab_size)
            num_chunks = math.ceil(vocab_size / columns)
            num_bytes = alone = num_tokens * padded(columns) * itemsize
        case InPlace(extent=extent, chunk_size=size):
            name, alone = "in place", 0
            tokens = size or num_tokens
            num_chunks += math.ceil((num_tokens - extent.num_tokens) / tokens)
            in_dweight, num_bytes = _bytes_in_place(extent, padded(vocab_size), hidden_size)
            num_bytes = max(num_bytes, tokens * padded(vocab_size) * itemsize if size else 0)
    operands = request.x, request.operand
    if is_kernel and linear_launch.unsupported_reason(*operands, settings.weight_layout) is None:
        alone = 0
    return LossPlan(
        name=name,
        implementation=settings.implementation,
        why_no_kernel=why_no_kernel,
        reason=reason,
        # The product of the gradient of a low-rank update is small.
        num_products=num_products - request.is_low_rank,
        num_products_alone=1,
        num_chunks=num_chunks,
        chunk_size=tokens,
        num_columns=columns,
        logits_bytes=num_bytes,
        logits_bytes_alone=alone,
        bytes_in_dweight=in_dweight,
    )


def _bytes_in_place(extent: in_place.Extent, vocab_size: int, hidden_size: int) -> tuple[int, int]:
    """Exponentials of 16 bits in the memory of `dweight`, and in memory of their own."""
    row = 2 * in_place.row_width(hidden_size, extent.dtype)
    beside = 2 * vocab_size * (extent.num_beside + -extent.num_beside % BLOCK_M)
    if not extent.bands.number:
        return 0, vocab_size * row + beside
    return vocab_size * row, extent.bands.num_copied * row + beside
