"""Models in Linen and in Equinox train on a GPU, and every layer runs its kernels. 20 s."""

import jax
import jax.numpy as jnp
import optax
import pytest

from pallas_kernels import require_kernels

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("framework", ["linen", "equinox"])
def test_a_model_trains_with_kernels_alone(framework):
    eqx = pytest.importorskip("equinox", reason="the models need the extra equinox")
    from support.framework_models import (
        EquinoxModel,
        LinenModel,
        V,
        equinox_model,
        linen_model,
    )

    rows = (jnp.arange(65) + jnp.arange(0, V, V // 8)[:, None]) % V
    tokens, labels = rows[:, :-1], rows[:, 1:]
    key = jax.random.key(0)
    if framework == "linen":
        model, loss_of = LinenModel().init(key, tokens, labels), linen_model()[1]
    else:
        model, loss_of = EquinoxModel(key), equinox_model()[1]
    arrays, rest = eqx.partition(model, eqx.is_array)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(arrays, opt_state):
        loss = lambda arrays: loss_of(eqx.combine(arrays, rest), tokens, labels)
        value, grads = jax.value_and_grad(loss)(arrays)
        with jax.numpy_dtype_promotion("standard"):  # optax adds integers to its float32
            updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(arrays, updates), opt_state, value

    losses, opt_state = [], optimizer.init(arrays)
    with require_kernels():
        for _ in range(6):
            arrays, opt_state, loss = step(arrays, opt_state)
            losses.append(float(loss))
    assert losses[-1] < 0.2 * losses[0], losses
