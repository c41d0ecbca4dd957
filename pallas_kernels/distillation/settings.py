"""Static settings of a distillation loss, and the chunks that it takes."""

import dataclasses
import itertools
import math
from collections.abc import Iterator
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.distillation.divergence import Divergence
from pallas_kernels.folding import even_chunk_size
from pallas_kernels.loss.counted import num_rows
from pallas_kernels.loss.layout import WeightLayout

# The output embedding of a teacher, which has a hidden size of its own.
TeacherEmbedding = Float[Array, "V Dt"] | Float[Array, "Dt V"]
type Tail = Literal["one_bucket", "ignore"]

# Bytes of the logits of a chunk, of student and teacher together, unless the caller gives a limit.
_LOGITS_BYTES = 512 * 2**20
# Fewest tokens of a chunk, unless the caller gives a limit. Every chunk reads and writes all of
# `dweight`: 8 bytes an entry for 2 FLOPs a token.
_MIN_CHUNK = 768
# Fewest tokens of a part of a chunk. A product reads all of the teacher's weight for each part: 2
# bytes an entry for 2 FLOPs a token, which is half of the time of 512 tokens on an H100.
_MIN_PART = 512
_TILE = 128  # tokens of a tile of XLA's products


class Chunk(NamedTuple):
    """Tokens whose logits exist at a time.

    Attributes:
      size: Tokens of the student's logits. They add to `dweight` once.
      part: Tokens of the teacher's logits, which are made and read by parts of the chunk.
    """

    size: int
    part: int


def _chunks(num_tokens: int, has_parts: bool) -> Iterator[Chunk]:
    """Sizes of whole tiles: the fewest chunks first, and among them the fewest parts."""
    tiles = lambda size: _TILE * max(1, math.ceil(size / _TILE))
    for num_chunks in itertools.count(1):
        size = even_chunk_size(num_tokens, tiles(num_tokens / num_chunks))
        for num_parts in range(1, math.ceil(size / _MIN_PART) + 1 if has_parts else 2):
            part = tiles(size / num_parts)
            if num_parts == 1 or part >= _MIN_PART:
                yield Chunk(num_parts * part, part)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Static settings of a call.

    Attributes:
      divergence: Divergence of the two distributions.
      temperature: Divisor of the logits.
      logit_softcap: Bound of the student's logits before the temperature; None sets no bound.
      teacher_logit_softcap: The same for the teacher's logits.
      weight_layout: Layout of the student's weight.
      teacher_weight_layout: Layout of the teacher's weight, if it has one.
      tail: Handling of the vocabulary outside of the `k` tokens whose log-probabilities are the
        teacher; None if the teacher has hidden states and a weight.
      logits_dtype: Dtype of logits in memory; None is that of the hidden states.
      chunk_size: Tokens of a chunk that the caller asks for.
      max_logits_bytes: Limit that the caller sets for logits in memory.
      vocab_axes: Manual mesh axes over which the caller has split the vocabulary.
      counted_fraction: Largest share of a device's tokens that the caller expects to count.
      has_teacher_bias: Whether the teacher's logits have a bias.
      kernels: Whether our kernels make the passes over the logits.
      is_low_rank: Whether the student's weight has a frozen and a low-rank part.
      has_bias: Whether the student's logits have a bias.
      required_by: Who demands the kernels, also for a device's part of the vocabulary; None if
        nobody.
    """

    divergence: Divergence
    temperature: float
    logit_softcap: float | None
    teacher_logit_softcap: float | None
    weight_layout: WeightLayout
    teacher_weight_layout: WeightLayout
    tail: Tail | None
    logits_dtype: jnp.dtype | None
    chunk_size: int | None
    max_logits_bytes: int | None
    vocab_axes: tuple[str, ...]
    counted_fraction: float
    has_teacher_bias: bool
    kernels: bool = False
    is_low_rank: bool = False
    has_bias: bool = False
    required_by: str | None = None

    def dtype_of_logits(self, hidden_states) -> jnp.dtype:
        """The dtype of the logits of these hidden states in memory."""
        return jnp.dtype(self.logits_dtype or hidden_states.dtype)

    def num_bytes(self, chunk: Chunk, x, teacher, vocab_size: int) -> int:
        """Bytes of all logits of a chunk, and of what is made of them in memory of its own.

        The gradient takes the memory of the student's logits if it has as many bytes an entry.

        Args:
          chunk: Tokens of the chunk.
          x: Hidden states of the student, or their shape and dtype.
          teacher: Arrays of the teacher, or their shapes and dtypes.
          vocab_size: Number of columns.
        """
        itemsize = self.dtype_of_logits(x).itemsize
        gradient = 0 if itemsize == x.dtype.itemsize else x.dtype.itemsize
        if self.is_low_rank and itemsize < 4:
            gradient += 4  # the sum of two products, in float32
        of_teacher = self.dtype_of_logits(teacher[0]).itemsize if self.tail is None else 0
        return ((itemsize + gradient) * chunk.size + of_teacher * chunk.part) * vocab_size

    def chunk(self, x, teacher, vocab_size: int, *, has_dweight: bool) -> Chunk:
        """The chunk with which the limit allows the fewest chunks.

        Each chunk reads and writes all of `dweight`. So if `dweight` is wanted, the teacher's
        logits exist for a part of the chunk at a time, and the chunk is longer in the same memory.
        A chunk is one part if XLA makes the passes, because XLA would copy a part of the student's
        logits. It is one part, too, if the gradient has another dtype than these logits and so
        memory of its own, or if the student's weight has a low-rank part.

        Args:
          x: As for `num_bytes`.
          teacher: As for `num_bytes`.
          vocab_size: Number of columns.
          has_dweight: Whether the gradient of the weight is wanted.
        """
        if self.chunk_size is not None:
            return Chunk(self.chunk_size, self.chunk_size)
        num_tokens = math.prod(x.shape[:-1])
        limit, least = self.max_logits_bytes, _TILE
        if limit is None:
            limit, least = _LOGITS_BYTES, _MIN_CHUNK
        limit = max(limit, self.num_bytes(Chunk(least, least), x, teacher, vocab_size))
        in_place = self.dtype_of_logits(x) == x.dtype
        has_parts = self.kernels and has_dweight and in_place and not self.is_low_rank
        fits = lambda chunk: self.num_bytes(chunk, x, teacher, vocab_size) <= limit
        return next(filter(fits, _chunks(num_tokens, has_parts)))

    def describe(self, x, teacher, vocab_size: int) -> str:
        """The plan for one device's arrays, in words."""
        fraction = 1.0 if self.vocab_axes else self.counted_fraction
        num_tokens = num_rows(math.prod(x.shape[:-1]), fraction)
        rows = jax.ShapeDtypeStruct((num_tokens, x.shape[-1]), x.dtype)
        found = self.chunk(rows, teacher, vocab_size, has_dweight=True)
        chunk = min(num_tokens, even_chunk_size(num_tokens, found.size))
        part = min(chunk, found.part)
        number = math.ceil(num_tokens / max(1, chunk))
        size = self.num_bytes(Chunk(chunk, part), x, teacher, vocab_size) / 2**20
        alone = 2 if self.tail is None else 1
        # The product of the gradient of a low-rank update is small.
        num = alone + 2 - self.is_low_rank
        products = f"{num} matrix products with all gradients, {alone} without gradients"
        text = (
            f"chunks of tokens: {products}\n"
            f"  {number} x ({chunk} tokens x {vocab_size} columns), {size:.1f} MiB of logits"
        )
        if part < chunk:
            text += f"\n  with gradients, teacher's logits of {part} tokens at a time"
        if num_tokens < math.prod(x.shape[:-1]):
            text += (
                f"\n  for {num_tokens} rows of tokens that count; if more count, all tokens are "
                "computed"
            )
        return text
