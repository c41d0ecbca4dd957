"""The numbers that the benchmark of memory reads from a run."""

import json

import pytest

from benchmarks.training import memory


def test_announced_memory():
    line = (
        "memory of the step: arguments 13.81 GiB, temporaries 18.51 GiB, in all 32.32 GiB of 75 GiB"
    )
    assert memory.announced_gib(f"compiled\n{line}\n") == 32.32
    small = line.replace("32.32 GiB", "512.00 MiB")
    assert memory.announced_gib(small) == 0.5
    with pytest.raises(ValueError, match="no line about the memory"):
        memory.announced_gib("compiled")


def test_peak(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [
        {"step": 1, "peak_memory_gib": 3.0},
        {"step": 2, "peak_memory_gib": 4.5},
        {"val_loss": 1},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert memory.peak_gib(path) == 4.5
    path.write_text(json.dumps({"step": 1}))
    with pytest.raises(ValueError, match="does not count"):
        memory.peak_gib(path)


@pytest.mark.full
def test_a_run_that_fails_says_why():
    with pytest.raises(RuntimeError, match="comma-separated list of"):
        memory.run("demo", "unrolled:nonsense", 1, 64)
