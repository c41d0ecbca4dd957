"""Reports of whole runs and of odd ones: no held-out rows, one row, none, a death half way."""

import base64
import json
import math
import re
from html.parser import HTMLParser

import matplotlib.image
import numpy as np
import pytest

from train.metrics import MetricsWriter
from train.report import load_metrics, plot, smooth, write_report


def train_row(step, **changes):
    return {
        "step": step,
        "loss": 5.0 / step + 1,
        "lr": 3e-4,
        "grad_norm": 0.5,
        "tokens": 4096 * step,
        "tokens_per_s": 40_000.0 + step,
        "mfu": 0.25,
        "step_time_s": 0.1,
        "memory_gib": 1.0 + step / 100,
        "elapsed_s": 0.1 * step,
    } | changes


def held_out_row(step, **changes):
    return {"step": step, "val_loss": 2.0, "val_bpb": 2.0 + 1 / step, "elapsed_s": 1.0} | changes


def make_run(run_dir, rows, config=None):
    with MetricsWriter(run_dir) as writer:
        if config is not None:
            writer.write_config(config)
        for row in rows:
            writer.write(row)
    return run_dir


class Page(HTMLParser):
    """Checks that tags are balanced; collects text by tag and what the page refers to."""

    VOID = frozenset({"meta", "img", "source", "br", "wbr", "link", "input"})

    def __init__(self, text):
        super().__init__()
        self.open, self.resources, self.text = [], [], {}
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        if tag not in self.VOID:
            self.open.append(tag)
        self.resources += [value for name, value in attrs if name in {"src", "srcset", "href"}]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open:
            self.text.setdefault(self.open[-1], []).append(data)


def report(run_dir, samples=(), summary=None):
    path = write_report(run_dir, samples=list(samples), summary=summary or {})
    assert path == run_dir / "report.html"
    return Page(path.read_text())


def tiles(page):
    return dict(zip(page.text.get("dt", []), page.text.get("dd", []), strict=True))


def test_rows_are_split_and_ordered(tmp_path):
    make_run(tmp_path, [train_row(1), held_out_row(1), train_row(2)])
    metrics = load_metrics(tmp_path)
    assert metrics.train == [train_row(1), train_row(2)]
    assert metrics.held_out == [held_out_row(1)]


def test_nonfinite_values_come_back(tmp_path):
    row = train_row(1, loss=math.nan, grad_norm=math.inf)
    make_run(tmp_path, [row])
    (loaded,) = load_metrics(tmp_path).train
    assert math.isnan(loaded.pop("loss"))
    row.pop("loss")
    assert loaded == row


def test_a_resumed_run_counts_once(tmp_path):
    make_run(tmp_path, [train_row(s) for s in range(1, 8)] + [held_out_row(4), held_out_row(6)])
    make_run(tmp_path, [train_row(5, loss=9.0), held_out_row(6, val_loss=9.0), train_row(6)])
    metrics = load_metrics(tmp_path)
    assert [row["step"] for row in metrics.train] == [1, 2, 3, 4, 5, 6]
    assert metrics.train[4]["loss"] == 9.0
    assert [(row["step"], row["val_loss"]) for row in metrics.held_out] == [(4, 2.0), (6, 9.0)]


def test_only_the_last_line_may_be_broken(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = json.dumps(train_row(1))
    path.write_text(f'{good}\n{{"step": 2, "lo')
    with pytest.warns(UserWarning, match='incomplete last line \'{"step": 2'):
        assert load_metrics(tmp_path).train == [train_row(1)]
    path.write_text(f'{good}\n{{"step": 2, "lo\n{good}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2 is not JSON"):
        load_metrics(tmp_path)


def test_plot_is_an_image_that_can_be_read(tmp_path):
    rows = [train_row(s) for s in range(1, 201)] + [held_out_row(s) for s in (1, 100, 200)]
    path = plot(make_run(tmp_path / "my-run", rows))
    assert path == tmp_path / "my-run" / "loss.png"
    height, width, _ = matplotlib.image.imread(path).shape
    assert 1000 < width < 2000 and 700 < height < 1500


def test_report_of_a_whole_run(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.orig_argv", ["python", "-m", "train", "--steps", "100"])
    rows = [train_row(s) for s in range(1, 101)] + [held_out_row(s) for s in (1, 50, 100)]
    config = {
        "model": {"hidden_size": 512, "rope_parameters": {"rope_theta": 1e4, "factor": None}},
        "seed": 17,
    }
    run_dir = make_run(tmp_path / "run-<7>", rows, config)
    page = report(
        run_dir,
        samples=[("if a < b:", "\n    return '&amp;'</pre><script>")],
        summary={"Parameters": 1_234_567, "Compile time": "3.1 s", "Wall time": "9:59"},
    )
    assert tiles(page) == {
        "Training loss": "1.0500",
        "Held-out loss": "2.0000",
        "Held-out bits per byte": "3.000 → 2.010",
        "Tokens per second": "40.1k",
        "MFU": "25.0%",
        "Peak memory": "2.00 GiB",
        "Tokens": "410k",
        "Wall time": "9:59",  # the summary's
        "Parameters": "1,234,567",
        "Compile time": "3.1 s",
    }
    assert page.text["h1"] == page.text["title"] == ["run-<7>"]
    assert page.text["h2"] == ["Details", "Samples", "Configuration", "Environment", "Command"]
    assert "script" not in page.text
    assert page.text["h3"] == ["if a < b:", "run", "model", "model.rope_parameters"]
    assert "\n    return '&amp;'</pre><script>" in page.text["pre"]
    assert page.text["pre"][-1] == "python -m train --steps 100"
    assert {"512", "10000.0", "null", "17"} <= set(page.text["td"])
    names = "|".join(page.text["th"])
    for name in ("hidden_size", "rope_theta", "python", "jax", "jaxlib", "flax"):
        assert name in names
    for name in ("optax", "device_kind", "num_devices"):
        assert name in names


def test_the_page_is_self_contained_in_both_colour_schemes(tmp_path):
    run_dir = make_run(tmp_path, [train_row(1), train_row(2)], {})
    page = report(run_dir)
    images = []
    for resource in page.resources:
        kind, data = resource.split(",", 1)
        assert kind == "data:image/png;base64"
        images.append(base64.b64decode(data))
    assert len(images) == 4 and len(set(images)) == 4
    assert all(image.startswith(b"\x89PNG") for image in images)
    text = (run_dir / "report.html").read_text()
    assert not re.search(r"https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([], id="empty"),
        pytest.param([train_row(1)], id="one row"),
        pytest.param([train_row(1), held_out_row(1)], id="one of each"),
        pytest.param([held_out_row(1)], id="held out alone"),
        pytest.param([train_row(s) for s in range(1, 80)], id="no held out"),
        pytest.param([{"step": s, "loss": 1.0} for s in range(1, 80)], id="constant loss alone"),
        pytest.param(
            [train_row(s, mfu=None, tokens_per_s=None, memory_gib=None) for s in range(1, 9)],
            id="no speed",
        ),
        pytest.param([train_row(s, loss=math.nan) for s in range(1, 80)], id="all nan"),
        pytest.param(
            [train_row(s, loss=math.nan if s > 70 else 2.0 / s) for s in range(1, 80)]
            + [held_out_row(80, val_loss=math.inf, val_bpb=math.inf)],
            id="diverged",
        ),
        pytest.param([train_row(1), train_row(2, loss=1e30)], id="huge loss"),
    ],
)
def test_reports_of_odd_runs(tmp_path, rows):
    page = report(make_run(tmp_path, rows))  # warnings are errors in this suite
    assert bool(page.resources) == bool(rows)
    assert ("Training loss" in tiles(page)) == any("loss" in row for row in rows)
    assert ("Held-out loss" in tiles(page)) == any("val_loss" in row for row in rows)
    assert (tmp_path / "loss.png").exists()


def test_report_of_a_run_that_died(tmp_path):
    make_run(tmp_path, [train_row(s) for s in range(1, 5)], {"seed": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.')
    with pytest.warns(UserWarning, match="incomplete last line"):
        page = report(tmp_path)
    assert tiles(page)["Training loss"] == "2.2500"


def test_one_held_out_row_shows_no_change(tmp_path):
    page = report(make_run(tmp_path, [train_row(1), held_out_row(1)]))
    assert tiles(page)["Held-out bits per byte"] == "3.000"


@pytest.mark.parametrize("size", [1, 2, 3, 100, 500])
def test_smoothing_against_a_plain_loop(size):
    values = np.random.default_rng(size).normal(size=size)
    values[size // 3] = np.nan
    values[size // 2] = np.inf
    expected = []
    for i in range(size):
        radius = min(size // 50, i)  # a slice ends where the values do
        window = [v for v in values[i - radius : i + radius + 1] if math.isfinite(v)]
        expected.append(sum(window) / len(window) if window else math.nan)
    np.testing.assert_allclose(smooth(values.tolist()), expected, rtol=1e-9)


def test_smoothing_keeps_a_straight_line_up_to_the_last_window():
    line = [3.0 - 0.5 * i for i in range(400)]
    np.testing.assert_allclose(smooth(line)[:-8], line[:-8], rtol=1e-9, atol=1e-9)
