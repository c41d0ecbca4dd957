"""A small language model of our layers, with options at random, and its loss in float64.

A block is a norm, the projections of heads in one kernel, products of them in place of attention,
the output projection, the norm with the residual addition, and the gated MLP. The parameters of all
blocks are stacked. They have the same names in NNX and in Linen.
"""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from pallas_kernels import layers, linen
from pallas_kernels.fp8 import Fp8DotGeneral, Fp8Einsum
from support.fp8_formulas import SMALL
from support.numerics import quick_jit

BF16, F32 = jnp.bfloat16, jnp.float32
FRAMEWORKS = "nnx", "nnx.jit", "linen"
KEPT = jax.checkpoint_policies.save_only_these_names("gate", "up", "fp8_x", "normed")


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the arrays: B, S, D, heads, size of a head, F and V."""

    batch: int
    sequence: int
    hidden: int
    heads: int
    head_size: int
    intermediate: int
    vocabulary: int


EVEN = Sizes(8, 16, 16, 4, 8, 256, 64)
ODD = Sizes(6, 7, 20, 2, 4, 22, 37)  # few numbers of devices divide an axis


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A model. Its hash is that of the object, so its functions are made once.

    Attributes:
      sizes: Sizes of the arrays.
      framework: "nnx" under `jax.jit`, "nnx.jit" with the transformations of NNX, or "linen".
      scan: Whether there are two blocks in a scan, and not one block.
      remat: Whether the backward computes all of a block again; "named" keeps some names.
      dtype: Dtype of the tokens.
      param_dtype: Dtype of the parameters.
      recipe: Recipe of the projections and of the MLP, or None.
      einsum: Whether the projections are `nnx.Einsum`, and not `nnx.LinearGeneral`.
      mlp: Options of the MLP.
      head: Options of the head.
      has_weights: Whether tokens have weights in the loss.
    """

    sizes: Sizes
    framework: str
    scan: bool
    remat: str
    dtype: Any
    param_dtype: Any
    recipe: Any
    einsum: bool
    mlp: Any
    head: Any
    has_weights: bool

    @property
    def num_blocks(self) -> int:
        """The number of blocks, whose parameters are stacked."""
        return 2 if self.scan else 1

    @classmethod
    def make(cls, rng, framework, dtypes) -> "Model":
        """A model at random, whose tokens and parameters have one of the pairs of dtypes."""
        recipe = rng.choice([None, None, *SMALL.values()])
        mlps = [{}, {"save": "all"}, {"save": "x"}, {"save": "x", "chunk_size": 4}]
        mlps += [{"use_bias": True}] * (framework != "linen")
        chunks = [{}, {"chunk_size": 8}, {"vocab_chunk_size": 16}]
        head = rng.choice(chunks) | {"use_bias": rng.random() < 0.3}
        if framework != "linen":
            head["weight_layout"] = rng.choice(["dv", "vd"])
        dtype, param_dtype = rng.choice(dtypes)
        return cls(
            sizes=rng.choice([EVEN, ODD]),
            framework=framework,
            scan=rng.random() < 0.5,
            remat=rng.choice(["", "all", "named"]),
            dtype=dtype,
            param_dtype=param_dtype,
            recipe=recipe,
            einsum=rng.random() < 0.5,
            mlp=rng.choice(mlps) if recipe is None else {},
            head=head,
            has_weights=rng.random() < 0.5,
        )


class Block(nnx.Module):
    """A block in NNX."""

    def __init__(self, model, rngs):
        sizes, dtypes = model.sizes, {"param_dtype": model.param_dtype}
        d, n, h = sizes.hidden, sizes.heads, sizes.head_size
        options: dict[str, Any] = {"dtype": model.dtype, "rngs": rngs, **dtypes}
        product: dict[str, Any] = {}
        if model.einsum:
            if model.recipe is not None:
                product = {"einsum_op": Fp8Einsum(model.recipe)}
            self.to_heads = nnx.Einsum("btd,dnch->btnch", (d, n, 3, h), **options, **product)
            self.of_heads = nnx.Einsum("btnh,nhd->btd", (n, h, d), **options, **product)
        else:
            if model.recipe is not None:
                product = {"dot_general": Fp8DotGeneral(model.recipe)}
            linear = functools.partial(nnx.LinearGeneral, use_bias=False, **options, **product)
            self.to_heads, self.of_heads = linear(d, (n, 3, h)), linear((n, h), d, axis=(-2, -1))
        self.norm, self.mlp_norm = layers.RMSNorm(d, **dtypes), layers.AddRMSNorm(d, **dtypes)
        self.mlp = layers.SwiGLU(d, sizes.intermediate, fp8=model.recipe, **options, **model.mlp)

    def __call__(self, x):
        return _block(self, x)


class Top(nnx.Module):
    """The last norm and the head in NNX."""

    def __init__(self, model, rngs):
        sizes, dtypes = model.sizes, {"param_dtype": model.param_dtype}
        self.norm = layers.RMSNorm(sizes.hidden, **dtypes)
        self.head = layers.LinearCrossEntropy(
            sizes.hidden, sizes.vocabulary, rngs=rngs, **dtypes, **model.head
        )

    def __call__(self, x, labels, weights):
        return self.head(self.norm(x), labels, token_weights=weights)


class LinenBlock(nn.Module):
    """A block in Linen."""

    model: Model

    @nn.compact
    def __call__(self, x):
        model = self.model
        sizes, dtypes = model.sizes, {"param_dtype": model.param_dtype}
        options: dict[str, Any] = {"use_bias": False, "dtype": model.dtype, **dtypes}
        if model.recipe is not None:
            options["dot_general"] = Fp8DotGeneral(model.recipe)
        parts = SimpleNamespace(
            norm=linen.RMSNorm(name="norm", **dtypes),
            to_heads=nn.DenseGeneral((sizes.heads, 3, sizes.head_size), name="to_heads", **options),
            of_heads=nn.DenseGeneral(sizes.hidden, axis=(-2, -1), name="of_heads", **options),
            mlp_norm=linen.AddRMSNorm(name="mlp_norm", **dtypes),
            mlp=linen.SwiGLU(
                sizes.intermediate, fp8=model.recipe, name="mlp", **dtypes, **model.mlp
            ),
        )
        return _block(parts, x)


class LinenTop(nn.Module):
    """The last norm and the head in Linen."""

    model: Model

    @nn.compact
    def __call__(self, x, labels, weights):
        dtypes = {"param_dtype": self.model.param_dtype}
        x = linen.RMSNorm(name="norm", **dtypes)(x)
        head = linen.LinearCrossEntropy(
            self.model.sizes.vocabulary, name="head", **dtypes, **self.model.head
        )
        return head(x, labels, weights)


def _block(parts, x):
    q, k, v = jnp.moveaxis(parts.to_heads(parts.norm(x)), 3, 0)
    normed, x = parts.mlp_norm(parts.of_heads(jnp.tanh(q) * k + v), x)
    return x + parts.mlp(normed)


@functools.cache
def _nnx_parts(model):
    """The graph definition and the shapes of the parameters of a block, and those of the top."""
    return [
        nnx.split(nnx.eval_shape(lambda cls=cls: cls(model, nnx.Rngs(0)))) for cls in (Block, Top)
    ]


@functools.cache
def _functions(model):
    """The shapes of the parameters and the function of a block, and those of the top."""
    if model.framework != "linen":
        return [
            (state, lambda p, *args, graphdef=graphdef: nnx.merge(graphdef, p)(*args))
            for graphdef, state in _nnx_parts(model)
        ]
    b, s, d = model.sizes.batch, model.sizes.sequence, model.sizes.hidden
    x, labels = jax.ShapeDtypeStruct((b, s, d), model.dtype), jax.ShapeDtypeStruct((b, s), "int32")
    return [
        (
            jax.eval_shape(module.init, jax.random.key(0), *args)["params"],
            lambda p, *args, module=module: module.apply({"params": p}, *args),
        )
        for module, args in ((LinenBlock(model), (x,)), (LinenTop(model), (x, labels, None)))
    ]


def make_args(model):
    """`(parameters, x, weights of tokens or None)`, and labels."""
    rng = np.random.default_rng(0)

    def fill(path, struct, lead=()):
        name, a = jax.tree_util.keystr(path), rng.standard_normal((*lead, *struct.shape))
        if "scale" in name or "bias" in name:
            return jnp.asarray(a / 8 + ("scale" in name), struct.dtype)
        contracted = struct.shape[-1:] if "embedding" in name else struct.shape[:1]
        contracted = struct.shape[:2] if "of_heads" in name else contracted
        return jnp.asarray(a / np.prod(contracted) ** 0.5, struct.dtype)

    (block, _), (top, _) = _functions(model)
    stacked = functools.partial(fill, lead=(model.num_blocks,))
    params = {
        "blocks": jax.tree_util.tree_map_with_path(stacked, block),
        "top": jax.tree_util.tree_map_with_path(fill, top),
    }
    shape = model.sizes.batch, model.sizes.sequence
    labels = rng.integers(0, model.sizes.vocabulary, shape, np.int32)
    labels[rng.random(shape) < np.linspace(0, 0.7, shape[0])[:, None]] = -100  # uneven on purpose
    x = jnp.asarray(rng.standard_normal((*shape, model.sizes.hidden)), model.dtype)
    weights = jnp.asarray(rng.uniform(0.5, 1.5, shape), F32) if model.has_weights else None
    return (params, x, weights), jnp.asarray(labels)


def graded(model, pin=lambda x: x):
    """The compiled function from `make_args` to the mean loss and its gradients.

    Args:
      model: Model.
      pin: Function that splits the tokens before and after each block.
    """
    remat = {} if model.remat == "all" else {"policy": KEPT}
    remat["prevent_cse"] = not model.scan

    def only(stacked):
        return jax.tree.map(lambda a: a[0], stacked)

    def loss(args, labels):
        params, x, weights = args
        (_, block), (_, top) = _functions(model)
        layer = lambda x, p: (pin(block(p, x)), None)
        layer = jax.checkpoint(layer, **remat) if model.remat else layer
        x = pin(x)
        if model.scan:
            x, _ = jax.lax.scan(layer, x, params["blocks"])
        else:
            x, _ = layer(x, only(params["blocks"]))
        return top(params["top"], x, labels, weights)

    def loss_of_modules(blocks, top, x, weights, labels):
        layer = lambda x, block: pin(block(x))
        layer = nnx.remat(layer, **remat) if model.remat else layer
        x = pin(x)
        if model.scan:
            x = nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, blocks)
        else:
            graphdef, params = nnx.split(blocks)
            x = layer(x, nnx.merge(graphdef, only(params)))
        return top(x, labels, weights)

    def run_modules(args, labels):
        params, *arrays = args
        pairs = zip(_nnx_parts(model), params.values(), strict=True)
        modules = [nnx.merge(graphdef, state) for (graphdef, _), state in pairs]
        number = 4 if model.has_weights else 3
        step = nnx.jit(nnx.value_and_grad(loss_of_modules, argnums=tuple(range(number))))
        value, (blocks, top, *rest) = step(*modules, *arrays, labels)
        return value, ({"blocks": blocks, "top": top}, *rest)

    return run_modules if model.framework == "nnx.jit" else quick_jit(jax.value_and_grad(loss))


def exact(args, labels):
    """The loss and the gradients in float64, as leaves in the order of `args`."""

    def wide(tree):
        tree = nnx.to_pure_dict(tree) if isinstance(tree, nnx.State) else tree
        return jax.tree.map(lambda a: np.asarray(a, np.float64), tree)

    params, *arrays = args
    params = {name: wide(tree) for name, tree in params.items()}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        found = _exact((params, *wide(arrays)), np.asarray(labels))
        return [np.asarray(a) for a in jax.tree.leaves(found)]


@quick_jit
@jax.value_and_grad
def _exact(args, labels):
    params, x, weights = args

    def norm(x, p):
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * p["scale"]

    def dense(x, p):
        return x @ p["kernel"] + p.get("bias", 0)

    def block(x, p):
        heads = jnp.einsum("btd,dnch->btnch", norm(x, p["norm"]), p["to_heads"]["kernel"])
        q, k, v = jnp.moveaxis(heads, 3, 0)
        y = jnp.einsum("btnh,nhd->btd", jnp.tanh(q) * k + v, p["of_heads"]["kernel"])
        mlp, normed = p["mlp"], norm(x + y, p["mlp_norm"])
        gate, up = dense(normed, mlp["gate_proj"]), dense(normed, mlp["up_proj"])
        return x + y + dense(jax.nn.silu(gate) * up, mlp["down_proj"]), None

    x, _ = jax.lax.scan(block, x, params["blocks"])
    head = params["top"]["head"]
    kernel = head["kernel"] if "kernel" in head else head["embedding"].T
    logits = norm(x, params["top"]["norm"]) @ kernel + head.get("bias", 0)
    log_probs = jax.nn.log_softmax(logits)
    of_labels = jnp.take_along_axis(log_probs, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
    weights = jnp.where(labels >= 0, 1.0 if weights is None else weights, 0.0)
    return -jnp.sum(of_labels * weights) / jnp.sum(weights)
