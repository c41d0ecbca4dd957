"""The chart of training steps, drawn from the tables of both benchmarks."""

import pytest
from matplotlib.patches import Rectangle

from benchmarks.training import step_chart

TABLE = """# Training step of a model

2026-11-21, NVIDIA H100, jax 0.11.2. Wall time.

| variant | ms/step | min - max | memory | compile |
|---|---|---|---|---|
| scanned:minimal | 280.6 | 280.0 - 282.0 | 34.7 GiB | 14 s |
| liger:full | 400.0 | 399.5 - 400.9 | 20.3 GiB | - |

| kind | launches | ms |
|---|---|---|
| GEMM | 1 | 2.0 |
"""


def test_rows_are_those_of_the_first_table():
    assert step_chart.rows_of(TABLE) == [
        ("scanned:minimal", 280.6, 34.7),
        ("liger:full", 400, 20.3),
    ]


def test_other_files_are_refused():
    with pytest.raises(ValueError, match="no table with variant"):
        step_chart.rows_of("| variant | ms |\n|---|---|\n")


def test_chart(tmp_path):
    path = tmp_path / "steps.md"
    path.write_text(TABLE)
    step_chart.main([str(path), str(path), str(tmp_path / "steps.png")])
    assert (tmp_path / "steps.png").stat().st_size > 1000
    newer = TABLE.replace("| liger:full | 400.0", "| liger:full | 390.0").replace("20.3", "20.1")
    figure = step_chart.draw([TABLE, newer.replace("280.6", "281.6")])
    assert figure.get_suptitle() == "Training step of a model, 2026-11-21, NVIDIA H100"
    left, right = figure.axes
    names = [label.get_text() for label in left.get_yticklabels()]
    assert names == ["ours: scanned, minimal", "transformers with Liger, checkpointed"]
    bars = [bar for bar in right.patches if isinstance(bar, Rectangle)]
    assert [bar.get_width() for bar in bars] == [34.7, 20.1]
    bars = [bar for bar in left.patches if isinstance(bar, Rectangle)]
    assert [bar.get_width() for bar in bars] == [281.6, 390]
