"""The sweep over the norms' widths without a GPU: what it checks, prints and writes."""

import functools
import json

import numpy as np
import pytest

from benchmarks import timing
from benchmarks.kernels import norm_widths, norm_widths_chart, ops, sweep
from benchmarks.kernels.tunables import TUNABLES


@pytest.fixture
def fake_kernels(monkeypatch, two_ms_a_call):
    """Plain JAX in the place of the kernels; a configuration of 4 warps in the forward errs."""

    def contender(op, config, implementation="mosaic_gpu"):
        plain = functools.partial(TUNABLES[op].fn, implementation="reference", config=None)
        errs = config is not None and config.fwd_warps == 4

        def run(*args):
            y, *rest = results if isinstance(results := plain(*args), tuple) else (results,)
            y = y * 1.02 if errs else y
            return (y, *rest) if rest else y

        return ops.Contender(str(config), TUNABLES[op].formula, run)

    monkeypatch.setattr(sweep, "contender", contender)
    monkeypatch.setattr(timing, "require_gpu", lambda: "a card")
    monkeypatch.setattr(timing, "_ROTATION_BYTES", 1)


@pytest.mark.full
@pytest.mark.usefixtures("fake_kernels")
def test_each_width_has_a_row_and_a_point_in_the_chart(capsys, tmp_path):
    path, image = tmp_path / "widths.json", tmp_path / "widths.png"
    norm_widths.main(["--rows", "8", "--widths", "64", "128", "--output", str(path)])
    table = capsys.readouterr().out.split("\n\n")[-1].splitlines()
    assert table[0].startswith("| rows x D | rms_norm forward | rms_norm backward | add_rms_norm f")
    assert [row.split(" | ")[0] for row in table[2:]] == ["| 8 x 64", "| 8 x 128"]
    assert all(row.count("1.000 (2000.0, +0.0)") == 4 for row in table[2:])
    entries = json.loads(path.read_text())["entries"]
    assert len(entries) == 8
    assert all(0 < entry["configs"]["default"]["error_ratio"] < 1.2 for entry in entries)

    norm_widths_chart.main([str(path), str(path), str(image)])
    assert image.read_bytes()[1:4] == b"PNG"
    panels = norm_widths_chart.draw([json.loads(path.read_text())] * 2).axes
    assert len(panels) == 4
    for panel in panels:
        for line in panel.get_lines()[:2]:
            np.testing.assert_array_equal(line.get_xydata(), [[64, 1], [128, 1]])


@pytest.mark.usefixtures("fake_kernels")
def test_a_candidate_that_errs_is_not_timed(capsys):
    flags = "--rows 8 --widths 1024 --candidates 4 --ops rms_norm --directions forward"
    norm_widths.main(flags.split())
    lines = capsys.readouterr().out.splitlines()
    (failed,) = [line for line in lines if "failed" in line and "fwd_reread=False" in line]
    assert "fwd_warps=4" in failed and "times as much as plain JAX" in failed


def test_the_error_ratio_is_that_of_the_worst_array():
    exact = {"y": np.ones(4), "dx": np.ones(4)}
    plain = {"y": np.full(4, 1.01), "dx": np.full(4, 1.01)}
    assert norm_widths.error_ratio(plain, plain, exact) == pytest.approx(1)
    assert norm_widths.error_ratio(plain | {"dx": np.full(4, 0.97)}, plain, exact) == pytest.approx(
        3
    )
    assert np.isnan(norm_widths.error_ratio(plain | {"y": np.full(4, np.nan)}, plain, exact))
