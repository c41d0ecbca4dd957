"""The comparison of losses in bfloat16 and in FP8: paired runs, their files, and the verdict."""

import json
import math

import numpy as np
import pytest

from benchmarks.training import fp8_learning, fp8_learning_report, make_tokens
from pallas_kernels.fp8 import RECIPES

STEPS = 6
TINY = (
    f"--steps {STEPS} --eval-every 3 --sequence-length 32 --batch-size 2 --layers 1 "
    "--hidden-size 64 --intermediate-size 64 --heads 2 --kv-heads 1 --warmup-steps 2"
).split()


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """A file of tokens from a folder of generated text."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdefgh"), 4)) for _ in range(50)]
    for number in range(60):
        (folder / f"{number}.md").write_text(" ".join(rng.choice(words, 60)))
    (folder / "copy.txt").write_text((folder / "0.md").read_text())
    path = folder / "tokens.npz"
    flags = ["--vocab-size", "300", "--held-out-every", "6"]
    make_tokens.main([str(folder), str(path), *flags])
    return path


@pytest.fixture(scope="module")
def folder(tokens, tmp_path_factory):
    """The files of three runs of a seed."""
    folder = tmp_path_factory.mktemp("runs")
    flags = ["--tokens", str(tokens), "--output", str(folder)]
    recipes = ["none", "perturbed", "tensorwise"]
    fp8_learning.main([*flags, *TINY, "--seeds", "0", "--recipes", *recipes])
    return folder


def test_a_copy_of_a_file_counts_once_and_parts_are_disjoint(tokens):
    text = fp8_learning.Text.load(tokens, 32)
    documents = [
        set(map(bytes, np.split(part.tokens, part.document_offsets[1:])))
        for part in (text.train, text.held_out)
    ]
    assert len(text.train.document_offsets) + len(text.held_out.document_offsets) == 60
    assert documents[0] and documents[1] and not documents[0] & documents[1]


def test_runs_of_a_seed_are_pairs(folder):
    runs = {run["recipe"]: run for run in fp8_learning_report.read_runs(folder)}
    baseline, recipe = runs["none"], runs["tensorwise"]
    assert [len(run["losses"]) for run in runs.values()] == [STEPS] * 3
    assert baseline["batches"] == recipe["batches"] and len(set(recipe["batches"])) == STEPS
    # The same parameters and data: rounding to FP8 is all that the first losses differ by.
    assert 0 < abs(baseline["losses"][0] - recipe["losses"][0]) < 0.01
    assert baseline["losses"][-1] < baseline["losses"][0] - 0.01
    assert recipe["losses"][-1] < recipe["losses"][0] - 0.01
    assert 0 < abs(baseline["losses"][-1] - runs["perturbed"]["losses"][-1]) < 0.01
    assert [row["step"] for row in recipe["held_out"]] == [3, 6]
    for row in recipe["held_out"]:
        assert 0 < abs(row["bf16"] - row["own"]) < 0.01
    assert all(row["bf16"] == row["own"] for row in baseline["held_out"])
    # Every weight of this model is below the recipe's least size.
    assert "q_proj, k_proj, v_proj, o_proj, mlp;" in recipe["programs"]["weights"]
    assert RECIPES["tensorwise"].least_size > 0


@pytest.mark.full
def test_a_run_alone_is_the_same_run(folder, tokens, tmp_path):
    flags = ["--tokens", str(tokens), "--output", str(tmp_path)]
    fp8_learning.main([*flags, *TINY, "--seeds", "0", "--recipes", "none"])
    name = "seed0_none.json"
    alone, beside = (json.loads((path / name).read_text()) for path in (tmp_path, folder))
    assert alone["losses"] == beside["losses"] and alone["batches"] == beside["batches"]


def test_other_batches_are_no_pair(folder, tmp_path):
    for path in folder.glob("*.json"):
        record = json.loads(path.read_text())
        if record["recipe"] == "tensorwise":
            record["batches"][1] += 1
        (tmp_path / path.name).write_text(json.dumps(record))
    with pytest.raises(ValueError, match="tensorwise and none of seed 0 differ"):
        fp8_learning_report.read_runs(tmp_path)
    (tmp_path / "seed0_none.json").unlink()
    with pytest.raises(ValueError, match="no run in bfloat16"):
        fp8_learning_report.read_runs(tmp_path)


def record(seed, recipe, losses, *, skipped=0, every=10):
    """A made-up run whose held-out losses are its training losses plus 1."""
    rows = [
        {"step": n, "bf16": losses[n - 1] + 1, "own": losses[n - 1] + 2}
        for n in range(every, len(losses) + 1, every)
    ]
    return {
        "seed": seed,
        "recipe": recipe,
        "steps": 100,
        "tokens_per_step": 64,
        "num_parameters": 1e6,
        "device": "a card",
        "versions": {"jax": "1"},
        "optimizer": {},
        "programs": {"memory_gib": 1.0, "calls": {"fp8_matmul": 3}},
        "losses": losses,
        "batches": [seed * 1000 + n for n in range(len(losses))],
        "skipped_steps": skipped,
        "step_ms": 2.0,
        "held_out": rows,
    }


def write(folder, records):
    for run in records:
        path = folder / f"seed{run['seed']}_{run['recipe']}.json"
        path.write_text(json.dumps(run))


def test_report_of_unequal_lengths(tmp_path):
    steps = 100
    curve = [4 - n / 100 for n in range(steps)]
    records = [record(seed, "none", [x + seed / 10 for x in curve]) for seed in (0, 1)]
    # Up to step 60 the gaps are 0.002 and 0.004; after it, seed 0 would be far off.
    late = [x + 0.002 + (n >= 60) for n, x in enumerate(curve)]
    records += [
        record(0, "tensorwise", late),
        record(1, "tensorwise", [x + 0.1 + 0.004 for x in curve[:67]]),
    ]
    write(tmp_path, records)
    runs = fp8_learning_report.read_runs(tmp_path)
    assert fp8_learning_report.common_steps(runs) == 67
    training, held_out, own = fp8_learning_report.measures(runs)
    assert "steps 65 to 67" in training.name and "step 60" in held_out.name
    np.testing.assert_allclose(list(training.gaps("tensorwise").values()), [1.002, 0.004])
    for measure in (held_out, own):
        np.testing.assert_allclose(list(measure.gaps("tensorwise").values()), [0.002, 0.004])
    np.testing.assert_allclose(held_out.values["none"][1], curve[59] + 1.1)
    text = fp8_learning_report.report(runs)
    assert "67 of 100 steps" in text and "standard deviation over seeds 0.0707" in text
    assert "| `tensorwise` | +0.0020 | +0.0040 | +0.0030 | 0.0010 | 0.0040 | 0 | passes |" in text
    chart = tmp_path / "chart.png"
    fp8_learning.main(["--report", str(tmp_path), "--chart", str(chart)])
    assert chart.stat().st_size > 1000


@pytest.mark.parametrize(
    ("gaps", "skipped", "passes"),
    [
        ([0.003, 0.004, 0.005], 0, True),
        ([0.003, 0.004, 0.0051], 0, False),  # two standard errors are 0.0012
        ([-0.02, 0.0, 0.05], 0, True),  # two standard errors are 0.042
        ([0.02, 0.021, 0.022], 0, False),
        ([-0.02, -0.021, -0.022], 0, True),
        ([0.0, 0.0, 0.0], 1, False),
        ([0.004], 0, True),
        ([0.0041], 0, False),
        ([math.nan, 0.0, 0.0], 0, False),
    ],
)
def test_rule(gaps, skipped, passes):
    assert fp8_learning_report.Verdict.of(gaps, skipped).passes is passes
