"""Names of the variants of TransformerEngine's step, which itself needs that library and a GPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.training.train_step_te import logits_loss, options_of


def test_options_of_a_variant():
    assert options_of("logits") == ("logits", None)
    assert options_of("ours:fp8=delayed") == ("ours", "delayed")


@pytest.mark.parametrize("name", ["theirs", "ours:fp8=rowwise", "ours:current", "ours:", "logits:"])
def test_unknown_parts_are_refused(name):
    with pytest.raises(ValueError, match=f"variant '{name}' must be one of logits, ours"):
        options_of(name)


def test_loss_by_logits():
    keys = jax.random.split(jax.random.key(0), 3)
    hidden = jax.random.normal(keys[0], (2, 3, 8))
    weight = jax.random.normal(keys[1], (11, 8))
    labels = jax.random.randint(keys[2], (2, 3), 0, 11)
    logits = np.einsum("bsd,vd->bsv", *(np.asarray(a, np.float64) for a in (hidden, weight)))
    expected = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(
        logits, np.asarray(labels)[..., None], -1
    ).squeeze(-1)
    loss = logits_loss(hidden, weight, labels)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, expected.mean(), rtol=1e-6)
