"""Static settings of a distillation loss, and the chunks that it takes."""

import dataclasses
import math
from typing import Literal

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
_TILE = 128


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Static settings of a call.

    Attributes:
      divergence: Divergence of the two distributions.
      temperature: Divisor of the logits.
      logit_softcap: Bound of the student's logits before the temperature; None sets no bound.
      teacher_logit_softcap: The same for the teacher's logits.
      weight_layout: Layout of the student's weight.
      teacher_weight_layout: Layout of the teacher's weight. None if stored log-probabilities of
        `k` tokens are the teacher.
      tail: Handling of the vocabulary outside of the `k` tokens; None without them.
      logits_dtype: Dtype of logits in memory; None is that of the hidden states.
      chunk_size: Tokens of a chunk that the caller asks for.
      max_logits_bytes: Limit that the caller sets for logits in memory.
      vocab_axes: Manual mesh axes over which the caller has split the vocabulary.
      kernels: Whether our kernels make the passes over the logits.
      counted_fraction: Largest share of a device's tokens that the caller expects to count.
      is_low_rank: Whether the student's weight has a frozen and a low-rank part.
      has_bias: Whether the student's logits have a bias.
      has_teacher_bias: Whether the teacher's logits have one.
    """

    divergence: Divergence
    temperature: float
    logit_softcap: float | None
    teacher_logit_softcap: float | None
    weight_layout: WeightLayout
    teacher_weight_layout: WeightLayout | None
    tail: Tail | None
    logits_dtype: jnp.dtype | None
    chunk_size: int | None
    max_logits_bytes: int | None
    vocab_axes: tuple[str, ...] = ()
    kernels: bool = False
    counted_fraction: float = 1.0
    is_low_rank: bool = False
    has_bias: bool = False
    has_teacher_bias: bool = False

    def dtype_of_logits(self, hidden_states) -> jnp.dtype:
        """The dtype of the logits of these hidden states in memory."""
        return jnp.dtype(self.logits_dtype or hidden_states.dtype)

    def bytes_of_token(self, x, teacher, vocab_size: int) -> int:
        """Bytes of all logits of a token, and of what is made of them in memory of its own.

        The gradient takes the memory of the student's logits if it has as many bytes an entry.

        Args:
          x: Hidden states of the student, or their shape and dtype.
          teacher: Arrays of the teacher, or their shapes and dtypes.
          vocab_size: Number of columns.
        """
        itemsize = self.dtype_of_logits(x).itemsize
        gradient = 0 if itemsize == x.dtype.itemsize else x.dtype.itemsize
        if self.is_low_rank and itemsize < 4:
            gradient += 4  # the sum of two products, in float32
        if self.tail is None:
            itemsize += self.dtype_of_logits(teacher[0]).itemsize
        return (itemsize + gradient) * vocab_size

    def chunk(self, x, teacher, vocab_size: int) -> int:
        """The largest number of tokens of a chunk. The arguments are those of `bytes_of_token`."""
        num_tokens = math.prod(x.shape[:-1])
        if self.chunk_size is not None:
            return self.chunk_size
        limit = self.max_logits_bytes
        bytes_of_token = self.bytes_of_token(x, teacher, vocab_size)
        fitting = (_LOGITS_BYTES if limit is None else limit) // bytes_of_token // _TILE * _TILE
        most = max(fitting, _MIN_CHUNK if limit is None else _TILE)
        # Evenly long chunks of whole tiles.
        num_chunks = max(1, math.ceil(num_tokens / most))
        return _TILE * max(1, math.ceil(num_tokens / num_chunks / _TILE))

    def describe(self, x, teacher, vocab_size: int) -> str:
        """The plan for one device's arrays, in words."""
        num_tokens = num_rows(math.prod(x.shape[:-1]), self.counted_fraction)
        chunk = min(num_tokens, even_chunk_size(num_tokens, self.chunk(x, teacher, vocab_size)))
        number = math.ceil(num_tokens / max(1, chunk))
        size = chunk * self.bytes_of_token(x, teacher, vocab_size) / 2**20
        alone = 2 if self.tail is None else 1
        # The product of the gradient of a low-rank update is small.
        with_gradients = alone + 2 - self.is_low_rank
        products = f"{with_gradients} matrix products with gradients, {alone} without"
        text = (
            f"chunks of tokens: {products}\n"
            f"  {number} x ({chunk} tokens x {vocab_size} columns), {size:.1f} MiB of logits"
        )
        if num_tokens < math.prod(x.shape[:-1]):
            text += f"\n  of {num_tokens} rows, or of all tokens where more of them count"
        return text
