"""The benchmark of dtypes without a GPU: all pairs run, and agree."""

import pytest

from benchmarks.kernels import dtypes
from benchmarks.kernels.dtypes import Row

ROWS = (
    Row(x="bfloat16", weight="float16"),
    Row(x="float32", weight="bfloat16", options=(("chunk_size", 16),)),
    Row(x="float32", weight="float32", precision="highest"),
)


@pytest.mark.full
@pytest.mark.usefixtures("two_ms_a_call")
def test_rows_have_their_plan_and_error():
    header, _, *rows = dtypes.measure((32, 64, 256), ROWS, 1)
    assert header.startswith("| x | weight | options | plan | ms |")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:3] for row in cells] == [
        ["bfloat16", "float16", ""],
        ["float32", "bfloat16", "chunk_size=16"],
        ["float32", "float32", "precision 'highest'"],
    ]
    assert [row[3:6] for row in cells] == [["token chunks, 3 products", "2.0", "1.000"]] * 3
    errors = [float(row[-1]) for row in cells]
    assert 1e-4 < errors[0] < 1e-2 and 1e-4 < errors[1] < 1e-2 and errors[2] < 1e-6


def test_all_pairs_are_measured():
    pairs = {(row.x, row.weight) for row in dtypes.ROWS if not row.options}
    assert pairs == {(x, weight) for x in dtypes.DTYPES for weight in dtypes.DTYPES}
