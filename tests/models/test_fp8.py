"""A Llama whose layers multiply in FP8: errors, layouts, policies, meshes, training."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import models.fp8
from models.config import LlamaConfig
from models.llama import Llama
from models.presets import PRESETS
from models.remat import POLICIES
from models.sampling import generate
from models.sharding import (
    batch_sharding,
    make_mesh,
    parameter_shardings,
    sum_over_devices,
)
from pallas_kernels.fp8 import RECIPES
from pallas_kernels.fp8.recipes import TENSORWISE
from pallas_kernels.gpu.device import Device
from support import small_llama, tiny_run
from support.jaxprs import equations
from support.numerics import assert_trees_as_accurate, rms
from support.small_llama import B, S, changed, random_tokens
from train.cli.command_line import parse_command_line
from train.step import init_state, make_eval_step, make_gradients, make_train_step, model_graph

pytestmark = pytest.mark.usefixtures("fast_compilation", "every_size_gains")

CONFIG = changed(tie_word_embeddings=True, attention_bias=True, qk_norm=True)
TOKENS = random_tokens(CONFIG)
COTANGENT = jax.random.normal(jax.random.key(1), (B, S, CONFIG.hidden_size))

# Errors in units of the errors of the same model in bfloat16. A number of e4m3 has 4 bits fewer
# than one of bfloat16, so it errs 16 times as much; but bfloat16 rounds the results of products,
# too. Measured are 8 to 12 units, for gradients that are rounded to e5m2 as well.
LEAST, MOST = 4, 16


@pytest.fixture(scope="module")
def every_size_gains():
    """The products of these small layers run in FP8, too."""
    with pytest.MonkeyPatch.context() as patch:
        for name, recipe in list(RECIPES.items()):
            patch.setitem(RECIPES, name, dataclasses.replace(recipe, least_size=0))
        yield


def on_one_device():
    return jax.set_mesh(make_mesh(data=1, fsdp=1, devices=jax.devices()[:1]))


def compute(config: LlamaConfig, state, tokens=TOKENS):
    """Hidden states and the gradients of their sum with fixed weights."""
    graphdef = nnx.graphdef(small_llama.make_model(config))
    hidden, vjp = jax.vjp(lambda state: nnx.merge(graphdef, state)(tokens), state)
    return {"hidden": hidden, "gradients": nnx.to_pure_dict(vjp(COTANGENT.astype(hidden.dtype))[0])}


def state_of(config: LlamaConfig = CONFIG) -> nnx.State:
    return nnx.state(small_llama.make_model(config))


@functools.cache
def results(fp8: str | None, **changes):
    """`compute` on one device, as a run trains."""
    config = changed(CONFIG, fp8=fp8, **changes)
    with on_one_device(), jax.numpy_dtype_promotion("standard"):
        return jax.jit(functools.partial(compute, config))(state_of())


def relative_error(got, exact) -> float:
    got, exact = (np.asarray(a, np.float64) for a in (got, exact))
    return rms(got - exact) / rms(exact)


@pytest.mark.parametrize(
    "recipe",
    [
        "tensorwise",
        pytest.param("rowwise", marks=pytest.mark.full),
        pytest.param("rowwise_with_gw_hp", marks=pytest.mark.full),
    ],
)
def test_errors_are_those_of_rounding_to_fp8(recipe):
    got, exact = results(recipe), results(None)
    in_bfloat16 = results(None, dtype="bfloat16")
    assert_trees_as_accurate(got, in_bfloat16, exact, slack=MOST)
    # And not much less, so that each product ran in FP8.
    ratio = lambda a, b, c: relative_error(a, c) / relative_error(b, c)
    ratios = jax.tree.map(ratio, got, in_bfloat16, exact)
    layers = ratios["gradients"]["layers"]
    assert min(jax.tree.leaves([ratios["hidden"], layers["self_attn"], layers["mlp"]])) > LEAST


# Other programs round other numbers to FP8, and numbers near a tie to the other neighbor.
OTHERS = [{"scan_layers": False}, *({"remat": name} for name in POLICIES if name != "none")]


@pytest.mark.full
@pytest.mark.parametrize("changes", OTHERS)
def test_layouts_and_policies_change_no_error(changes):
    assert_trees_as_accurate(results("tensorwise", **changes), results("tensorwise"), results(None))


@pytest.mark.full
def test_unrolled_layers_that_run_again_change_no_error():
    got = results("tensorwise", scan_layers=False, remat="full")
    assert_trees_as_accurate(got, results("tensorwise"), results(None))


def test_layers_on_a_mesh_gather_fp8():
    expected = results("tensorwise"), results(None)
    mesh = make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])
    config = changed(CONFIG, fp8="tensorwise", remat="minimal")
    with jax.set_mesh(mesh):
        state = jax.device_put(state_of(), parameter_shardings(state_of(), mesh))
        compiled = jax.jit(functools.partial(compute, config)).lower(state).compile()
        got = compiled(state)
    assert_trees_as_accurate(got, *expected)
    # XLA for CPUs moves FP8 numbers as float16. The columns are scales.
    gathers = r"= \(?(\w+)\[(\d+),(\d+)\]\S* all-gather(?:-start)?\("
    kinds = {k for k, _, columns in re.findall(gathers, compiled.as_text() or "") if columns != "1"}
    assert kinds == {"f16"}


def on_mesh(fp8: str | None, sizes: tuple[int, int, int], **changes):
    """`compute` as a step does it where devices share sequences, and its program. 12 s."""
    data, fsdp, tensor = sizes
    mesh = make_mesh(data=data, fsdp=fsdp, tensor=tensor, devices=jax.devices()[: math.prod(sizes)])
    config = changed(CONFIG, fp8=fp8, **changes)
    graphdef = nnx.graphdef(small_llama.make_model(config))

    def sums(state, batch):
        hidden = nnx.merge(graphdef, state)(batch["tokens"])
        return jnp.sum(hidden * batch["cotangent"].astype(hidden.dtype), dtype=jnp.float32)

    with jax.set_mesh(mesh):
        state = jax.device_put(state_of(), parameter_shardings(state_of(), mesh))
        batch = {"tokens": TOKENS, "cotangent": COTANGENT}
        batch = jax.device_put(batch, batch_sharding(mesh))
        graded = jax.jit(jax.grad(lambda *args: sum_over_devices(sums)(*args)))
        compiled = graded.lower(state, batch).compile()
        return nnx.to_pure_dict(compiled(state, batch)), compiled.as_text() or ""


@pytest.mark.parametrize(
    "recipe, sizes, changes",
    [
        ("tensorwise", (1, 2, 2), {"remat": "minimal"}),
        pytest.param("rowwise", (2, 1, 2), {"remat": "full"}, marks=pytest.mark.full),
        pytest.param("rowwise", (1, 2, 2), {"scan_layers": False}, marks=pytest.mark.full),
        pytest.param("rowwise_with_gw_hp", (1, 2, 2), {}, marks=pytest.mark.full),
        *(
            pytest.param("tensorwise", (1, 2, 2), changes, marks=pytest.mark.full)
            for changes in OTHERS
        ),
    ],
)
def test_devices_that_share_sequences(recipe, sizes, changes):
    """Each device quantizes its part, so errors are those of one device or less. 6 s a case."""
    # On one device first: JAX would take programs of the other mesh from its caches.
    expected = results(recipe)["gradients"], results(None)["gradients"]
    got, text = on_mesh(recipe, sizes, **changes)
    # Errors of other roundings are other random numbers: the ratio of two root mean squares of 16
    # numbers scatters by 25 %.
    assert_trees_as_accurate(got, *expected, slack=2.0)
    # XLA for CPUs moves FP8 numbers as float16.
    if sizes[1] > 1 and recipe == "tensorwise":
        gathers = re.findall(r"= \(?f16\[\d+,\d+\]\S* all-gather(?:-start)?\(", text)
        assert gathers


@pytest.mark.parametrize(
    "recipe", ["rowwise", pytest.param("rowwise_with_gw_hp", marks=pytest.mark.full)]
)
def test_policies_may_name_the_quantized_inputs(recipe):
    """If the gradients of weights are products in FP8, the layers keep their inputs in FP8."""
    program = functools.partial(compute, changed(CONFIG, fp8=recipe))
    found = equations(jax.make_jaxpr(program)(state_of()).jaxpr)
    names = {e.params["name"] for e in found if e.primitive.name == "name"}
    assert ("fp8_x" in names) == (recipe == "rowwise")


def test_q_k_and_v_are_one_product_whose_input_is_kept_in_fp8_alone():
    config = changed(CONFIG, fp8="tensorwise", remat="minimal")
    with on_one_device():
        jaxpr = jax.make_jaxpr(functools.partial(compute, config))(state_of()).jaxpr
    found = list(equations(jaxpr))
    x, heads = (B, S, config.hidden_size), config.num_attention_heads * config.head_dim
    joined = heads + 2 * config.num_key_value_heads * config.head_dim
    shape = lambda variable: variable.aval.shape
    operations = [e for e in found if e.primitive.name == "operation"]
    shapes = [
        (shape(e.invars[0]), shape(e.outvars[0]))
        for e in operations
        if e.params["operation"].name == "fp8_linear"
    ]
    assert shapes == [(x, (B, S, joined)), ((B, S, heads), x)]
    kept = [shape(e.outvars[0]) for e in found if e.primitive.name == "empty"]
    layers = config.num_hidden_layers
    # The inputs of q with k and v, of o and of the MLP.
    assert kept.count((layers, config.hidden_size, B, S)) == 3
    # The residual before and after the MLP; the norms of both are not kept.
    assert kept.count((layers, *x)) == 2


# Training


TRAINED = dataclasses.replace(
    tiny_run.CONFIG,
    model=dataclasses.replace(tiny_run.CONFIG.model, fp8="tensorwise", num_hidden_layers=1),
)


def batch_of(seed):
    tokens = np.random.default_rng(seed).integers(64, size=(1, 8, 16), dtype=np.int32)
    return {"tokens": jnp.asarray(tokens), "labels": jnp.asarray(tokens)}


def test_a_step_with_nan_is_skipped_and_others_are_taken():
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    with jax.numpy_dtype_promotion("standard"), jax.set_mesh(mesh):
        step = jax.jit(make_train_step(TRAINED))
        state = init_state(TRAINED, mesh)
        taken = state
        for seed in range(2):  # the learning rate of the first step is 0
            taken, metrics = step(taken, batch_of(seed))
            assert np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"])
            assert metrics["skipped_steps"] == 0
        moved = jax.tree.map(lambda a, b: np.any(a != b), taken.params, state.params)
        assert all(jax.tree.leaves(moved))
        for bad in (np.nan, np.inf):
            poison = lambda path, a, bad=bad: (
                a.at[0, 0, 0].set(bad) if "up_proj" in jax.tree_util.keystr(path) else a
            )
            params = jax.tree_util.tree_map_with_path(poison, state.params)
            after, metrics = step(dataclasses.replace(state, params=params), batch_of(1))
            assert np.isnan(metrics["loss"]) and metrics["skipped_steps"] == 1
            jax.tree.map(np.testing.assert_array_equal, after.params, params)


def fp8_in(fn, *args) -> bool:
    return "f8_e" in str(jax.make_jaxpr(fn)(*args))


def test_evaluation_and_sampling_run_without_fp8():
    config = TRAINED
    params = jax.eval_shape(lambda: nnx.state(Llama(config.model, rngs=nnx.Rngs(0)), nnx.Param))
    batch = batch_of(0)
    part = {name: a[0] for name, a in batch.items()}
    with jax.numpy_dtype_promotion("standard"):
        assert fp8_in(make_gradients(config), params, batch)
        assert not fp8_in(make_eval_step(config), params, part)
        sample = lambda params: generate(
            nnx.merge(model_graph(config.model), params), part["tokens"][:, :4], max_new_tokens=2
        )
        assert not fp8_in(sample, params)


def test_a_run_says_what_is_in_fp8(monkeypatch):
    model = PRESETS["llama3.2-1b"]
    monkeypatch.setitem(RECIPES, "tensorwise", TENSORWISE)
    assert models.fp8.describe(dataclasses.replace(model, fp8="tensorwise")) == (
        "FP8, tensorwise: q_proj, k_proj, v_proj, o_proj, mlp; "
        "evaluations and samples run in bfloat16"
    )
    assert "no weight; too small, so in float32: q_proj, k_proj, v_proj, o" in models.fp8.describe(
        dataclasses.replace(tiny_run.MODEL, fp8="tensorwise")
    )


def test_the_flag_names_a_recipe():
    config = parse_command_line(["--preset", "llama3.2-1b", "--model.fp8", "rowwise"])
    assert config.model.fp8 == "rowwise"
    assert parse_command_line([]).model.fp8 is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mlp_bias": True, "qk_norm": False}, " mlp_bias=True"),
        ({"hidden_act": "gelu"}, "got hidden_act='gelu'"),
        ({"mlp_chunk_size": 4, "remat": "full"}, " mlp_chunk_size=4"),
    ],
)
def test_configurations_that_cannot_run_raise(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        changed(CONFIG, fp8="tensorwise", **changes)


@pytest.mark.usefixtures("unchecked_shapes")
def test_a_name_of_no_recipe_raises():
    with pytest.raises(ValueError, match="fp8='delayed' must be None or one of tensorwise, row"):
        changed(CONFIG, fp8="delayed")


def test_a_gpu_without_fp8_raises(monkeypatch):
    a100 = Device("NVIDIA A100-SXM4-40GB", (8, 0), 108)
    monkeypatch.setattr(models.fp8, "target_device", lambda: a100)
    config = changed(CONFIG, fp8="tensorwise")
    with pytest.raises(
        ValueError, match=r"fp8='tensorwise' needs a GPU with FP8.*A100.*has \(8, 0\)"
    ):
        jax.eval_shape(functools.partial(compute, config), state_of())
