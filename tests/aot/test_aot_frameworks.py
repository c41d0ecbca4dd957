"""A model in Linen and one in Equinox, compiled for an H100: all layers run kernels. 30 s.

Both are in one program, so that kernels of one shape are compiled once.
"""

import jax
import jax.numpy as jnp
import pytest

from aot.harness import Case
from support.framework_models import D, F, equinox_model, linen_model

pytestmark = pytest.mark.oldest
TOKENS = jax.ShapeDtypeStruct((8, 256), jnp.int32)
(VARIABLES, LINEN_LOSS), (MODULE, EQUINOX_LOSS) = linen_model(), equinox_model()


def gradients(variables, module, tokens, labels):
    return (
        jax.grad(LINEN_LOSS)(variables, tokens, labels),
        jax.grad(EQUINOX_LOSS)(module, tokens, labels),
    )


CASES = {"both": Case(gradients, (VARIABLES, MODULE, TOKENS, TOKENS))}


@pytest.mark.parametrize("chip, case", [("h100", "both")])
def test_every_layer_runs_its_kernels(compiled, chip, case):
    program = compiled(chip, case)
    names = {kernel.name for kernel in program.kernels}
    norms = {"rms_norm_fwd", "rms_norm_bwd", "add_rms_norm_fwd"}
    mlp = {"gated_matmul", "gated_matmul_backward"}
    # The losses of Equinox' sequences have cotangents of their own, so their forward is alone.
    loss = {"linear_exponentials", "linear_exponentials_again", "linear_statistics"}
    assert names == norms | mlp | loss
    # Each model has two norms, the MLP and the loss, forward and backward. `vmap` adds no kernel.
    assert sum(i.is_kernel for i in program.instructions.values()) == 2 * 8
    # XLA transposes Equinox's weights in the casts, and the gradients in the products.
    copies = [i for i in program.instructions.values() if i.opcode in ("copy", "transpose")]
    assert max((i.largest_size for i in copies), default=0) < D * F
