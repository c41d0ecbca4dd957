"""The contenders of `benchmarks/kernels/attention.py`, each with all of its tiles."""

import dataclasses
import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernels import documents, shapes
from benchmarks.kernels.documents import Direction
from benchmarks.kernels.formulas import (
    ATTENTION,
    DOCUMENT_ATTENTION,
    FULL_ATTENTION,
    Arrays,
    Formula,
)
from pallas_kernels.attention import AttentionConfig, ForwardConfig, KeysConfig, QueriesConfig

DIRECTIONS: tuple[Direction, Direction] = ("forward", "forward+backward")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A contender with its tiles.

    Attributes:
      name: Name of the contender.
      tiles: Tiles, as the tables show them; empty if the contender chooses them.
      attend: Function `(q, k, v) -> out` of `[B, S, heads, H]`. With `DOCUMENT_ATTENTION` it also
        takes the number of each token's document, `[B, S]`.
      directions: Directions to time.
      formula: Formula that it computes.
      dtype: Dtype of its arrays.
      scales_logits: Whether it divides the logits by √H. If not, its queries are divided before.
    """

    name: str
    tiles: str
    attend: Callable[..., jax.Array]
    directions: tuple[Direction, ...] = DIRECTIONS
    formula: Formula = ATTENTION
    dtype: Any = jnp.bfloat16
    scales_logits: bool = True

    def program(self, direction: Direction) -> Callable[..., Arrays]:
        """The function of `q`, `k`, `v`, `dout` and the documents, if any, to compile."""

        def forward(q, k, v, dout, *ids) -> Arrays:
            del dout
            return {"out": self.attend(q, k, v, *ids)}

        def both(q, k, v, dout, *ids) -> Arrays:
            out, vjp = jax.vjp(lambda *qkv: self.attend(*qkv, *ids), q, k, v)
            dq, dk, dv = vjp(dout)
            return {"out": out, "dq": dq, "dk": dk, "dv": dv}

        return forward if direction == "forward" else both

    def arguments(self, arrays: Arrays) -> tuple[jax.Array, ...]:
        """The arguments of the program."""
        q = arrays["q"] if self.scales_logits else arrays["q"] * _scale(arrays["q"])
        floats = (a.astype(self.dtype) for a in (q, arrays["k"], arrays["v"], arrays["dout"]))
        ids = (arrays["segment_ids"],) if "segment_ids" in self.formula.inputs else ()
        return (*floats, *ids)

    def results(self, results: Arrays) -> Arrays:
        """The results of the program as those of the formula."""
        if self.scales_logits or "dq" not in results:
            return results
        return results | {"dq": results["dq"] * _scale(results["dq"])}


def _scale(q: jax.Array) -> float:
    return q.shape[-1] ** -0.5


def variants(*, with_tokamax: bool) -> list[Variant]:
    """The contenders that run in JAX, each with all of its tiles."""
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
    xla = functools.partial(jax.nn.dot_product_attention, implementation="xla")
    return [
        Variant("cuDNN", "", functools.partial(cudnn, is_causal=True)),
        Variant("ours", "", documents.by_kernels),
        Variant("XLA", "", functools.partial(xla, is_causal=True)),
        Variant("cuDNN, no mask", "", cudnn, formula=FULL_ATTENTION),
        *_of_jax(),
        *(_of_tokamax() if with_tokamax else ()),
    ]


def of_window(window: int) -> list[Variant]:
    """The contenders where a token attends to as many tokens at most, itself included."""
    cudnn = functools.partial(
        jax.nn.dot_product_attention,
        implementation="cudnn",
        is_causal=True,
        local_window_size=(window - 1, 0),
    )
    ours = functools.partial(documents.by_kernels, window=window)
    formula = dataclasses.replace(ATTENTION, fn=functools.partial(ATTENTION.fn, window=window))
    return [
        Variant("cuDNN", "", cudnn, formula=formula),
        Variant("ours", "", ours, formula=formula),
    ]


def of_documents(num_documents: int, *, with_transformer_engine: bool) -> list[Variant]:
    """The contenders on rows of so many documents, ours with all of its tiles.

    Where heads have 128 channels, some of the tiles spill registers, and others are refused.
    """
    cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn", is_causal=True)
    variant = functools.partial(Variant, formula=DOCUMENT_ATTENTION)
    found = [
        Variant("cuDNN, whole rows", "", cudnn),
        variant("cuDNN, mask", "", documents.masked),
        variant("ours", "", documents.by_kernels),
    ]
    for warpgroups, block_kv, stages in (
        *((warpgroups, 64, stages) for warpgroups in (1, 2, 4) for stages in (2, 4)),
        (2, 128, 2),
        (4, 128, 2),
    ):
        forward = ForwardConfig(warpgroups=warpgroups, block_kv=block_kv, max_stages=stages)
        run = functools.partial(documents.by_kernels, config=AttentionConfig(forward=forward))
        label = f"{warpgroups} x 64x{block_kv}x{stages}"
        found.append(variant("ours", label, run, DIRECTIONS[:1]))
    for (warpgroups, stages), of_dkdv in (
        ((2, 4), (64, 3)),
        ((4, 4), (64, 3)),
        ((2, 4), (128, 2)),
        ((3, 3), (64, 3)),
        ((2, 3), (64, 3)),
    ):
        dq = QueriesConfig(warpgroups=warpgroups, stages=stages)
        dkdv = KeysConfig(tile=of_dkdv[0], stages=of_dkdv[1])
        run = functools.partial(documents.by_kernels, config=AttentionConfig(dq=dq, dkdv=dkdv))
        label = f"dq {warpgroups} x 64x64x{stages}, dk and dv 2 x 64x{shapes.label(of_dkdv)}"
        found.append(variant("ours", label, run, DIRECTIONS[1:]))
    if with_transformer_engine:
        run = functools.partial(documents.by_transformer_engine, num_documents=num_documents)
        found.append(variant("TransformerEngine, packed", "", run))
    return found


def _of_jax() -> list[Variant]:
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")

    def attend(is_causal: bool, block_q: int, block_kv: int, stages: int, **backward: int):
        config = module.TuningConfig(block_q, block_kv, stages, causal=is_causal, **backward)
        return lambda q, k, v: module.attention(q, k, v, config)

    of_float16 = {"dtype": jnp.float16, "scales_logits": False}
    full = {"formula": FULL_ATTENTION, **of_float16}
    found = [
        # Not supported by JAX 0.11 and 0.12.
        Variant("JAX, bfloat16", "64x128x2", attend(True, 64, 128, 2), scales_logits=False)
    ]
    for tiles in ((64, 128, 2), (64, 128, 3), (64, 256, 2), (128, 64, 2)):
        label, run = "x".join(map(str, tiles)), attend(True, *tiles)
        # The backward, which raises an error, is asked for once.
        directions = DIRECTIONS if tiles == (64, 128, 2) else DIRECTIONS[:1]
        found.append(Variant("JAX, float16", label, run, directions, **of_float16))
    forward = DIRECTIONS[:1]
    found.append(
        Variant("JAX, float16, no mask", "64x128x2", attend(False, 64, 128, 2), forward, **full)
    )
    for block_q, block_kv, warpgroups in ((64, 64, 2), (128, 64, 1), (128, 64, 2)):
        run = attend(
            False,
            64,
            128,
            2,
            block_q_dkv=block_q,
            block_kv_dkv=block_kv,
            block_q_dq=block_q,
            block_kv_dq=block_kv,
            compute_wgs_bwd=warpgroups,
        )
        label = f"{block_q}x{block_kv}, warpgroups: {warpgroups}"
        found.append(Variant("JAX, float16, no mask", label, run, DIRECTIONS[1:], **full))
    return found


def _of_tokamax() -> list[Variant]:
    attention = importlib.import_module("tokamax").dot_product_attention
    # Its public function takes a kernel with a configuration, but does not export either.
    folder = "tokamax._src.ops.attention"
    kernel = importlib.import_module(f"{folder}.api").IMPLEMENTATIONS["mosaic_gpu"]
    forward = importlib.import_module(f"{folder}.pallas_mosaic_gpu_kernel_sm90").Config
    backward = importlib.import_module(f"{folder}.pallas_mosaic_gpu_vjp_common").Config

    def attend(kernel):
        return functools.partial(attention, is_causal=True, implementation=(kernel,))

    found = []
    # The first is the default, the third and the fourth are what its own tuning found for rows of
    # 4096 and head sizes 128 and 64.
    for block_q, block_kv, stages in ((64, 128, 2), (64, 128, 3), (64, 256, 3), (128, 64, 2)):
        config = forward(block_q=block_q, block_kv=block_kv, num_stages=stages)
        run = attend(kernel.replace(config=config, vjp=kernel.vjp))
        label = f"{block_q}x{block_kv}x{stages}"
        found.append(Variant("tokamax", label, run, DIRECTIONS[:1]))
    config = forward(block_q=64, block_kv=128, num_stages=2)
    # The first is the default and what its own tuning found for rows of 4096.
    for of_dkv, of_dq, stages in (
        ((64, 64), (64, 64), 2),
        ((64, 64), (64, 64), 3),
        ((64, 64), (64, 128), 2),
        ((128, 64), (64, 64), 2),
        ((128, 64), (128, 64), 2),
    ):
        of_backward = backward(
            block_q_dkv=of_dkv[0],
            block_kv_dkv=of_dkv[1],
            block_q_dq=of_dq[0],
            block_kv_dq=of_dq[1],
            num_stages=stages,
        )
        run = attend(kernel.replace(config=config, vjp=kernel.vjp.replace(config=of_backward)))
        label = f"dk and dv {shapes.label(of_dkv)}, dq {shapes.label(of_dq)}, {stages} stages"
        found.append(Variant("tokamax", label, run, DIRECTIONS[1:]))
    return found
