"""The benchmark of the sharded norm on CPU devices: the comparison and the table."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from benchmarks.kernels import sharded


@pytest.mark.parametrize("backward", [pytest.param(False, marks=pytest.mark.full), True])
def test_contenders_that_run_here_agree_and_the_other_is_listed(backward):
    mesh = Mesh(np.array(jax.devices()[:4]), ("tensor",), axis_types=(AxisType.Auto,))
    results = sharded.measure((8, 256), mesh, 2, backward=backward)
    assert results.keys() == sharded.CONTENDERS.keys()
    assert results["mosaic_gpu"]["error"].startswith("NotImplementedError")
    for name in ("all-reduce, add_rms_norm", "xla"):
        result = results[name]
        assert len(result["times_ms"]) == 2
        moved = (4 if backward else 2) * 3 / 4 * 8 * 256 * 2
        assert result["bytes_per_s"] == pytest.approx(moved / result["median_ms"] * 1e3)
    text = sharded.table([{"name": "8x256 forward", "results": results}])
    assert "| 8x256 forward | " in text and "NotImplementedError" in text


def test_a_wrong_result_is_not_timed(monkeypatch):
    fn, is_split = sharded.CONTENDERS["xla"]

    def wrong(*args):
        y, residual = fn(*args)
        return y * 1.2, residual

    monkeypatch.setitem(sharded.CONTENDERS, "xla", (wrong, is_split))
    mesh = Mesh(np.array(jax.devices()[:2]), ("tensor",), axis_types=(AxisType.Auto,))
    results = sharded.measure((8, 256), mesh, 1, backward=False)
    assert results["xla"]["error"].startswith("wrong result")
