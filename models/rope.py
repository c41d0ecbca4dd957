"""Rotary position embedding as Hugging Face's Llama computes it, for each of its rope types.

Channel `i` and channel `i + H/2` of a head form a pair, which is rotated by the angle
`position * inv_freq[i]`. This is the "rotate-half" layout of Hugging Face, so checkpoints need no
permutation of q and k.

Numerics: angles, cos and sin are float32, and the rotation is float32 with one rounding to the
input's dtype. Hugging Face rounds cos and sin to the model's dtype first; in float32 both are the
same. The inverse frequencies are computed in float32, in Hugging Face's order of operations. They
are within 1 ulp of Hugging Face's and nearly always equal; computed in float64 and rounded at the
end, they would differ in a third of the channels.

Two types look at the data: "dynamic" and "longrope" choose their frequencies by the largest
position in the whole array. So the loss of such a model depends on which rows are in one batch, and
with `mesh.tensor` above 1 on which rows are on one device. The choice is traced, so the host never
waits for it. A "dynamic" model of Hugging Face also remembers the longest sequence so far. Here
the result depends on the arguments alone, and equals a freshly loaded model's.

Source: transformers 5.23, `modeling_rope_utils.py` and `models/llama/modeling_llama.py`.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# The fields that each rope type needs, and the fields that it reads when they are set.
REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("original_max_position_embeddings",),
    "longrope": ("original_max_position_embeddings", "short_factor", "long_factor"),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
OPTIONAL_FIELDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": (),
    "dynamic": (),
    "yarn": (
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    ),
    "longrope": ("factor", "attention_factor"),
    "llama3": (),
}

# Angles are computed in float32.
_LARGEST = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RopeParameters:
    """Hugging Face's `rope_parameters`; a field is None unless its rope type reads it.

    Attributes:
      rope_type: Rule that makes the frequencies: default, linear, dynamic, yarn, longrope or
        llama3.
      rope_theta: Base of the frequencies. Channel pair i of a head of size H has the frequency
        rope_theta ** (-2i / H) before the scaling of the type.
      factor: Ratio of the context length to the original length. With "yarn" and "longrope", None
        means `max_position_embeddings / original_max_position_embeddings`.
      low_freq_factor: "llama3": let C be `original_max_position_embeddings`. Frequencies whose
        wavelength is above C / low_freq_factor are divided by `factor`.
      high_freq_factor: "llama3": frequencies whose wavelength is below C / high_freq_factor are
        kept.
      original_max_position_embeddings: Context length before scaling, in tokens.
      attention_factor: "yarn", "longrope": factor of cos and sin; None computes it from `factor`.
      beta_fast: "yarn": number of rotations over the original context above which a frequency is
        kept; None is 32.
      beta_slow: "yarn": number of rotations over the original context below which a frequency is
        divided by `factor`; None is 1.
      mscale: "yarn": with `mscale_all_dim`, the numerator of `attention_factor`.
      mscale_all_dim: "yarn": the denominator of `attention_factor`.
      truncate: "yarn": whether the ends of the ramp are rounded to whole channels; None is True.
      short_factor: "longrope": H/2 divisors of the frequencies, for sequences up to the original
        length.
      long_factor: "longrope": H/2 divisors of the frequencies, for longer sequences.
    """

    rope_type: str = "default"
    rope_theta: float
    factor: float | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None

    def __post_init__(self):
        if self.rope_type not in REQUIRED_FIELDS:
            raise ValueError(
                f"rope_type={self.rope_type!r} must be one of {sorted(REQUIRED_FIELDS)}"
            )
        required = REQUIRED_FIELDS[self.rope_type]
        read = {"rope_type", "rope_theta", *required, *OPTIONAL_FIELDS[self.rope_type]}
        given = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) is not None
        }
        if missing := [name for name in required if name not in given]:
            raise ValueError(f"rope type {self.rope_type!r} needs {missing}, given: {given}")
        if unread := {name: value for name, value in given.items() if name not in read}:
            raise ValueError(f"rope type {self.rope_type!r} does not read {unread}: leave them out")
        for name, value in given.items():
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, float | int) and not abs(number) <= _LARGEST:  # or NaN
                    raise ValueError(f"{name}={value!r} must be finite, also in float32")
        if not self.rope_theta > 1:
            raise ValueError(f"rope_theta={self.rope_theta!r} must be greater than 1")
        if self.factor is not None and not self.factor >= 1:
            raise ValueError(f"factor={self.factor!r} must be at least 1")
        original = self.original_max_position_embeddings
        if original is not None and not original > 1:
            raise ValueError(
                f"original_max_position_embeddings={original!r} must be greater than 1"
            )
        if self.attention_factor is not None and not self.attention_factor > 0:
            raise ValueError(f"attention_factor={self.attention_factor!r} must be positive")
        if self.rope_type == "yarn":
            fast = 32.0 if self.beta_fast is None else self.beta_fast
            slow = 1.0 if self.beta_slow is None else self.beta_slow
            if not fast >= slow > 0:
                raise ValueError(
                    f"beta_fast={self.beta_fast!r} (32 if None) must be at least "
                    f"beta_slow={self.beta_slow!r} (1 if None), and both positive"
                )
        for name in ("mscale", "mscale_all_dim"):
            if (value := given.get(name)) is not None and not value > 0:
                raise ValueError(
                    f"{name}={value} must be positive; leave it out, because transformers takes 0 "
                    "for a field that is not there"
                )
        if self.low_freq_factor is not None and self.high_freq_factor is not None:
            if not self.high_freq_factor > self.low_freq_factor > 0:
                raise ValueError(
                    f"high_freq_factor={self.high_freq_factor!r} must be greater than "
                    f"low_freq_factor={self.low_freq_factor!r}, and both positive"
                )
        for factors in (self.short_factor, self.long_factor):
            if factors is not None and not all(factor > 0 for factor in factors):
                raise ValueError(
                    f"short_factor={self.short_factor!r} and long_factor={self.long_factor!r} must "
                    "be positive"
                )


def rotary_cos_sin(
    rope: RopeParameters,
    positions: Int[Array, "B S"],
    *,
    head_dim: int,
    max_position_embeddings: int,
) -> tuple[Float[Array, "B S {head_dim//2}"], Float[Array, "B S {head_dim//2}"]]:
    """`cos(positions * inv_freq)` and `sin(positions * inv_freq)`, times the attention factor.

    Everything is float32. "dynamic" and "longrope" take the largest of all `positions` for the
    length of the sequence, as Hugging Face does for a batch.

    Args:
      rope: Rope type and its settings.
      positions: Position of each token in its own sequence, from 0.
      head_dim: Size H of a head.
      max_position_embeddings: Context length of the configuration, in tokens. "dynamic" scales past
        it; "yarn" and "longrope" compute a missing `factor` from it.

    Raises:
      ValueError: `head_dim` is odd or does not fit `rope`.
    """
    if head_dim < 2 or head_dim % 2:
        raise ValueError(f"{head_dim=} must be even: rotary embedding turns pairs of channels")
    inv_freq = _inverse_frequencies(rope.rope_theta, head_dim)
    attention_factor = 1.0
    match rope.rope_type:
        case "linear":
            inv_freq = inv_freq / _set(rope.factor)
        case "llama3":
            inv_freq = _llama3_frequencies(rope, head_dim)
        case "yarn":
            inv_freq, attention_factor = _yarn_frequencies(rope, head_dim, max_position_embeddings)
        case "dynamic":
            inv_freq = _dynamic_frequencies(rope, positions, head_dim, max_position_embeddings)
        case "longrope":
            inv_freq, attention_factor = _longrope_frequencies(
                rope, positions, head_dim, max_position_embeddings
            )
    angles = positions.astype(jnp.float32)[..., None] * inv_freq
    return jnp.cos(angles) * attention_factor, jnp.sin(angles) * attention_factor


def apply_rotary(
    x: Float[Array, "B S N H"], cos: Float[Array, "#B S H//2"], sin: Float[Array, "#B S H//2"]
) -> Float[Array, "B S N H"]:
    """`[x1 cos - x2 sin, x2 cos + x1 sin]` with `x1, x2` the halves of each head.

    Computed in float32 and rounded once to `x.dtype`.
    """
    x1, x2 = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)


def _set[T](value: T | None) -> T:
    """The value of a field that `RopeParameters` has required for this type."""
    assert value is not None
    return value


def _powers(theta: float, head_dim: int) -> np.ndarray:
    """`theta ** (2i / head_dim)` in float32: the wavelengths over 2π."""
    return np.float32(theta) ** _exponents(head_dim)


def _exponents(head_dim: int) -> np.ndarray:
    return np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)


def _inverse_frequencies(theta: float, head_dim: int) -> np.ndarray:
    return np.float32(1) / _powers(theta, head_dim)


def _llama3_frequencies(rope: RopeParameters, head_dim: int) -> np.ndarray:
    """Long wavelengths divided by `factor`, short ones kept, a linear blend between the two."""
    factor = _set(rope.factor)
    low, high = _set(rope.low_freq_factor), _set(rope.high_freq_factor)
    original = _set(rope.original_max_position_embeddings)
    inv_freq = _inverse_frequencies(rope.rope_theta, head_dim)
    wavelength = 2 * math.pi / inv_freq
    smooth = (original / wavelength - low) / (high - low)
    blended = (1 - smooth) * inv_freq / factor + smooth * inv_freq
    scaled = np.where(wavelength > original / low, inv_freq / factor, blended)
    return np.where(wavelength < original / high, inv_freq, scaled)


def _yarn_frequencies(
    rope: RopeParameters, head_dim: int, max_position_embeddings: int
) -> tuple[np.ndarray, float]:
    """YaRN (https://arxiv.org/abs/2309.00071): a ramp over channels between two frequencies."""
    original = _set(rope.original_max_position_embeddings)
    factor = rope.factor or max_position_embeddings / original
    if (attention_factor := rope.attention_factor) is None:
        attention_factor = _mscale(factor, 1.0)
        if rope.mscale and rope.mscale_all_dim:
            attention_factor = _mscale(factor, rope.mscale) / _mscale(factor, rope.mscale_all_dim)

    def channel_rotating(rotations: float) -> float:
        """The channel pair, as a real number, that rotates this often over the original context."""
        wavelength_ratio = math.log(original / (rotations * 2 * math.pi))
        return head_dim * wavelength_ratio / (2 * math.log(rope.rope_theta))

    first, last = channel_rotating(rope.beta_fast or 32.0), channel_rotating(rope.beta_slow or 1.0)
    if rope.truncate is None or rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    # Hugging Face bounds the ramp by head_dim - 1, although there are only head_dim / 2 pairs.
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001

    powers = _powers(rope.rope_theta, head_dim)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - first) / (last - first), 0, 1)
    kept = 1 - ramp
    inv_freq = np.float32(1) / (factor * powers) * (1 - kept) + np.float32(1) / powers * kept
    return inv_freq, attention_factor


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _dynamic_frequencies(
    rope: RopeParameters,
    positions: Int[Array, "B S"],
    head_dim: int,
    max_position_embeddings: int,
) -> Float[Array, " {head_dim//2}"]:
    """NTK-aware: past `max_position_embeddings` the base grows with the sequence length."""
    if head_dim < 4:
        raise ValueError(f"{head_dim=} must be at least 4 for the rope type 'dynamic'")
    factor = _set(rope.factor)
    unscaled = _inverse_frequencies(rope.rope_theta, head_dim)
    length = (jnp.max(positions) + 1).astype(jnp.float32)
    longer = length > max_position_embeddings
    # Below the limit, the growth would be below 1, and its power unused or NaN.
    length = jnp.where(longer, length, float(max_position_embeddings))
    growth = factor * length / max_position_embeddings - (factor - 1)
    theta = rope.rope_theta * growth ** (head_dim / (head_dim - 2))
    return jnp.where(longer, 1 / theta ** _exponents(head_dim), unscaled)


def _longrope_frequencies(
    rope: RopeParameters,
    positions: Int[Array, "B S"],
    head_dim: int,
    max_position_embeddings: int,
) -> tuple[Float[Array, " {head_dim//2}"], float]:
    """LongRoPE (https://arxiv.org/abs/2402.13753): one divisor per channel, short or long."""
    original = _set(rope.original_max_position_embeddings)
    short_factor, long_factor = _set(rope.short_factor), _set(rope.long_factor)
    if not len(short_factor) == len(long_factor) == head_dim // 2:
        raise ValueError(
            f"{len(short_factor)=} and {len(long_factor)=} must be half of {head_dim=}; give each "
            "pair of channels one factor"
        )
    factor = rope.factor or max_position_embeddings / original
    if (attention_factor := rope.attention_factor) is None:
        attention_factor = 1.0
        if factor > 1:
            attention_factor = math.sqrt(1 + math.log(factor) / math.log(original))
    powers = _powers(rope.rope_theta, head_dim)
    short, long = (
        np.float32(1) / (np.asarray(divisors, np.float32) * powers)
        for divisors in (short_factor, long_factor)
    )
    return jnp.where(jnp.max(positions) + 1 > original, long, short), attention_factor
