"""The chart of several GPUs, drawn from the files of results."""

import json

import numpy as np
import pytest

from benchmarks.training import gpus_chart

TRAINING = """# Training

| model | mesh | tokens a step | tokens/s | MFU |
|---|---|---|---|---|
| 1B | one GPU | 4 x 4096 | 64,500 | 53.6 % |
| 1B | data 4 | 16 x 4096 | 246,000 | 51.1 % |
| 1B | data 4, 8 channels | 16 x 4096 | 228,000 | 47.3 % |
| 8B | fsdp 4 | 4 x 8192 | 38,900 | 50.6 % |

| fsdp x tensor | step ms |
|---|---|
| 1x4 | 18.6 |
"""
NAMES = ["all-reduce, add_rms_norm", "xla", "mosaic_gpu"]
SHARDED = [
    {
        "name": f"8192x4096 {direction}",
        "shape": [8192, 4096],
        "results": {name: {"median_ms": i + 1.0} for i, name in enumerate(NAMES)},
    }
    for direction in ("forward", "forward and backward")
]


def test_only_meshes_of_one_axis_have_a_speed():
    assert gpus_chart.speeds(TRAINING) == {
        ("1B", "data"): {1: 64500, 4: 246000},
        ("8B", "fsdp"): {4: 38900},
    }


def test_other_files_are_refused():
    with pytest.raises(ValueError, match="no table with model"):
        gpus_chart.speeds("| model | ms |\n|---|---|\n")


def test_chart(tmp_path):
    sharded, training, chart = (tmp_path / name for name in ("norm.json", "train.md", "gpus.png"))
    sharded.write_text(json.dumps(SHARDED))
    training.write_text(TRAINING)
    gpus_chart.main([str(sharded), str(training), str(chart)])
    assert chart.stat().st_size > 1000
    norm, speed = gpus_chart.draw(SHARDED, [TRAINING]).axes
    assert [bar.get_height() for bars in norm.containers for bar in bars] == [1, 1, 2, 2, 3, 3]
    np.testing.assert_array_equal(speed.lines[0].get_ydata(), [64.5, 246])
