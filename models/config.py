"""The configuration of a Llama: sizes, options and their checks."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

from models.remat import remat_policy
from models.rope import RopeParameters
from pallas_kernels.arguments import check_number
from pallas_kernels.fp8 import RECIPES

AUTO_REMAT = "auto"

# The values that these fields may have besides None.
_CHOICES = {
    "implementation": ("reference", "xla", "mosaic_gpu", "require"),
    "fp8": tuple(RECIPES),
    "attention_implementation": ("xla", "cudnn", "mosaic_gpu"),
}

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
}


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LlamaConfig:
    """A Llama. The fields down to `rope_parameters` have Hugging Face's names and meanings.

    `qk_norm` is the exception: config.json has no such key. It is true if the model type is Qwen 3.

    Attributes:
      vocab_size: Number of tokens in the vocabulary, V.
      hidden_size: Size of the hidden states, D.
      intermediate_size: Width of the MLP, F.
      num_hidden_layers: Number of layers, L.
      num_attention_heads: Number of query heads, N.
      num_key_value_heads: Number of key and value heads, K; each serves N/K query heads.
      head_dim: Number of channels of a head, H; 0 means D/N. D must be a multiple of N in either
        case, as in transformers.
      hidden_act: Activation of the MLP's gate: "silu", "gelu", "gelu_pytorch_tanh" or "relu".
      max_position_embeddings: Longest sequence, in tokens; only the rope type "dynamic" takes
        longer ones.
      initializer_range: Standard deviation of the initial embeddings and kernels.
      rms_norm_eps: Number that every norm adds to the mean square.
      tie_word_embeddings: Whether the output embedding is the input embedding.
      attention_bias: Whether the four projections of the attention have biases.
      mlp_bias: Whether the three projections of the MLP have biases.
      qk_norm: Whether each head of the queries and keys has an RMSNorm over its `head_dim` channels
        before the rotary embedding, as in Qwen 3. It needs an MLP without biases, as Qwen 3's is.
      sliding_window: Number of tokens that a token attends to at most in each layer, itself
        included, as in Mistral 7B v0.1. None is no limit. A model with a window is a Mistral, so it
        needs `attention_bias`, `mlp_bias` and `qk_norm` to be false.
      attention_dropout: Dropout of the attention, which must be 0.0. The field is there to refuse
        models that need dropout.
      bos_token_id: Token that a text starts with.
      eos_token_id: Token, or tokens, that a text ends with.
      pad_token_id: Token whose look-up has no gradient, as in torch. A tied output embedding and
        weight decay still change its row.
      rope_parameters: Rotary position embedding.
      dtype: Dtype of the activations and of the operands of matrix products: bfloat16, float16 or
        float32.
      param_dtype: Dtype of the parameters: bfloat16, float16 or float32.
      scan_layers: Whether the layers run in one loop, which compiles faster. Unrolled layers run
        faster in most measurements.
      remat: Policy that says which tensors the layers keep for the backward (see
        docs/remat_and_planner.md): none, minimal, mlp_inputs, attention, full or offload. A list of
        tensors is also a policy, such as "attention,residual,gate@host,up@host". There "@host"
        means host memory, which needs `scan_layers`. With auto, `python -m train` takes the fastest
        policy that fits the device.
      mlp_chunk_size: Number of positions that the MLP computes at a time; 0 means all positions. It
        is for long sequences, in which gate and up are the largest arrays. It needs a `remat` that
        keeps neither gate nor up, and an MLP without biases.
      implementation: Implementation of every operation of `pallas_kernels`, except for those of
        FP8 and the attention. `None` runs the kernels where they take the arguments, and XLA
        elsewhere. "xla" is plain JAX, for comparison. "reference" is the formula of each operation.
        "mosaic_gpu" runs the kernels, and raises where one cannot run. "require" runs the kernels
        that `None` would run, and raises where no kernel runs. If devices share sequences, as
        `mesh.tensor` says, the function `sharded_add_rms_norm` replaces `add_rms_norm`. The
        docstrings of this function and of `linear_cross_entropy` say which values they take.
      fp8: Recipe by which training multiplies in FP8 in the projections and MLPs of the layers:
        tensorwise, rowwise or rowwise_with_gw_hp. None multiplies in `dtype`. FP8 needs the
        activation "silu", and an MLP without biases and chunks. The dtype of the parameters stays
        the same. Generation of text runs in `dtype`.
      attention_implementation: Library that computes the attention. `None` takes the kernels of
        `document_attention` where they run and are as fast as cuDNN: in rows of documents, in rows
        longer than `sliding_window`, with heads of 64 channels, and with heads of 128 channels in
        rows of up to 8192 tokens. Elsewhere it takes cuDNN where that runs: in 16 bits, with heads
        of 8, 16, ... or 128 channels (on Hopper up to 256) and an even number of positions. If
        neither runs, XLA computes the attention and keeps all scores in memory. On a GPU the log
        says why, and also why cuDNN reads a mask. cuDNN reads one for rows of documents, and none
        for a window alone. "mosaic_gpu" takes `document_attention`, and raises where its kernels do
        not run.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 0
    hidden_act: str = "silu"
    max_position_embeddings: int
    initializer_range: float = 0.02
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_window: int | None = None
    attention_dropout: float = 0.0
    bos_token_id: int | None = None
    eos_token_id: int | tuple[int, ...] | None = None
    pad_token_id: int | None = None
    rope_parameters: RopeParameters

    dtype: str = "bfloat16"
    param_dtype: str = "float32"
    scan_layers: bool = True
    remat: str = "minimal"
    mlp_chunk_size: int = 0
    implementation: Literal["reference", "xla", "mosaic_gpu", "require"] | None = None
    fp8: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None = None
    attention_implementation: Literal["xla", "cudnn", "mosaic_gpu"] | None = None

    def __post_init__(self):
        for name in ("dtype", "param_dtype"):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, jnp.dtype(value).name)
            except TypeError as error:
                raise ValueError(f"{name}={value!r} is not a dtype such as bfloat16") from error
            if getattr(self, name) not in _DTYPES:
                raise ValueError(f"{name}={value!r} must be one of {', '.join(_DTYPES)}")
        for name, choices in _CHOICES.items():
            if (value := getattr(self, name)) not in (None, *choices):
                raise ValueError(f"{name}={value!r} must be None or one of {', '.join(choices)}")
        for name in _SIZES:
            _check_whole(name, getattr(self, name), 1)
        _check_whole("head_dim", self.head_dim, 0)
        if self.sliding_window is not None:
            _check_whole("sliding_window", self.sliding_window, 1)
        remedy = "models have 1e-5 or 1e-6"
        check_number("rms_norm_eps", self.rms_norm_eps, least=0.0, remedy=remedy)
        if not 0 <= self.initializer_range <= 1:
            raise ValueError(
                f"initializer_range={self.initializer_range!r} must be from 0 to 1; transformers "
                "loads no other model"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(f"hidden_act={self.hidden_act!r} must be one of {sorted(ACTIVATIONS)}")
        if self.hidden_act != "silu" and self.implementation in ("mosaic_gpu", "require"):
            raise ValueError(
                f"implementation={self.implementation!r}: no kernel computes an MLP with "
                f"hidden_act={self.hidden_act!r}; take implementation=None"
            )
        self._check_tokens()
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} must be a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of "
                f"num_attention_heads={self.num_attention_heads}, and transformers does not load "
                "such a Llama, whatever its head_dim; change one of them"
            )
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim!r} must be even: rotary embedding turns pairs of channels"
            )
        if self.qk_norm and self.mlp_bias:
            raise ValueError(
                f"qk_norm={self.qk_norm} makes a Qwen 3, whose MLP has no biases in transformers; "
                "set mlp_bias=False"
            )
        options = [n for n in ("attention_bias", "mlp_bias", "qk_norm") if getattr(self, n)]
        if self.sliding_window is not None and options:
            raise ValueError(
                f"sliding_window={self.sliding_window} makes a Mistral, which has no "
                f"{' and no '.join(options)} in transformers; set sliding_window=None, or "
                f"{' and '.join(f'{name}=False' for name in options)}"
            )
        if self.attention_dropout:
            raise NotImplementedError(
                f"attention_dropout={self.attention_dropout!r} is not implemented; set it to 0.0, "
                "Llama's value"
            )
        rope, longest = self.rope_parameters, self.max_position_embeddings
        original = rope.original_max_position_embeddings or longest
        if rope.rope_type == "yarn" and rope.factor is None and longest < original:
            raise ValueError(
                f"max_position_embeddings={longest} is below {original=} of the rope type 'yarn', "
                "which has no factor to divide by; set rope_parameters.factor"
            )
        policy = None if self.remat == AUTO_REMAT else remat_policy(self.remat)
        if policy is not None and policy.offloaded and not self.scan_layers:
            raise ValueError(
                f"remat={self.remat!r} keeps tensors in host memory, which needs scan_layers=True: "
                "with unrolled layers XLA sends tensors late and fetches them early, and saves "
                "hardly any memory"
            )
        size = self.mlp_chunk_size
        _check_whole("mlp_chunk_size", size, 0)
        if size and (self.mlp_bias or self.hidden_act != "silu"):
            raise ValueError(
                f"mlp_chunk_size={size} is for hidden_act='silu' without biases, got "
                f"hidden_act={self.hidden_act!r} and mlp_bias={self.mlp_bias}; set "
                "mlp_chunk_size=0"
            )
        if size and policy is not None and {"gate", "up"} & policy.kept:
            raise ValueError(
                f"mlp_chunk_size={size} makes gate and up again, which remat={self.remat!r} keeps; "
                "use 'full', 'attention', 'mlp_inputs' or 'layer_input@host'"
            )
        if self.fp8 is not None and (size or self.mlp_bias or self.hidden_act != "silu"):
            raise ValueError(
                f"fp8={self.fp8!r} is for hidden_act='silu' without biases and chunks of the MLP, "
                f"got hidden_act={self.hidden_act!r}, mlp_bias={self.mlp_bias} and "
                f"mlp_chunk_size={size}; set fp8=None or change these"
            )

    def fits(self, sequence_length: int) -> bool:
        """Whether the model takes sequences of this length. The rope type "dynamic" takes any."""
        grows = self.rope_parameters.rope_type == "dynamic"
        return grows or sequence_length <= self.max_position_embeddings

    def _check_tokens(self) -> None:
        eos = self.eos_token_id if isinstance(self.eos_token_id, tuple) else (self.eos_token_id,)
        for name, token in (
            ("bos_token_id", self.bos_token_id),
            ("pad_token_id", self.pad_token_id),
            *(("eos_token_id", token) for token in eos),
        ):
            if token is not None:
                _check_whole(name, token, 0)
        if self.pad_token_id is not None and self.pad_token_id >= self.vocab_size:
            raise ValueError(
                f"pad_token_id={self.pad_token_id} must be below vocab_size={self.vocab_size}; "
                "None is for no padding"
            )


def _check_whole(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise ValueError(f"{name}={value!r} must be a whole number from {least} to 2**31 - 1")
