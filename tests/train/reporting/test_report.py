"""Reports of whole runs and of odd ones: no held-out rows, one row, no row, an early end."""

import base64
import errno
import json
import math
import os
import re
from html.parser import HTMLParser

import matplotlib.image
import matplotlib.text
import numpy as np
import pytest

import train.reporting.report
import train.reporting.rows
from train.errors import DiskError, RunError
from train.reporting import compare, figures
from train.reporting.figures import smooth
from train.reporting.metrics import MetricsWriter
from train.reporting.page import figure_html, page_html
from train.reporting.report import write_report
from train.reporting.results import RunMetrics, load_metrics
from train.reporting.rows import write_whole


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
    """Checks that tags are balanced; collects text by tag, and references of the page."""

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


def test_a_broken_line_is_left_out_and_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = json.dumps(train_row(1))
    path.write_text(f'{good}\n{{"step": 2, "lo')
    with pytest.warns(UserWarning, match='incomplete last line \'{"step": 2'):
        assert load_metrics(tmp_path).train == [train_row(1)]
    path.write_text(f'{good}\n{{"step": 2, "lo\n{json.dumps(train_row(3))}\n')
    with pytest.warns(UserWarning, match=r"metrics\.jsonl:2 is no row and is left out: .*\"lo"):
        assert load_metrics(tmp_path).train == [train_row(1), train_row(3)]


def test_the_curve_is_an_image_that_can_be_read(tmp_path):
    rows = [train_row(s) for s in range(1, 201)] + [held_out_row(s) for s in (1, 100, 200)]
    report(make_run(tmp_path / "my-run", rows))
    height, width, _ = matplotlib.image.imread(tmp_path / "my-run" / "loss.png").shape
    assert 1000 < width < 2000 and 700 < height < 1500


@pytest.mark.parametrize(
    "name", [r"lr$\foo$", r"$\frac{1", "_x", "<b>&amp;", "\N{SNOWMAN}日本", "x" * 200, "\udcff"]
)
def test_any_name_of_a_run_is_drawn_and_shown_as_it_is(name, tmp_path):
    metrics = RunMetrics([train_row(1)], [])
    assert figures.loss_png(metrics, name, figures.LIGHT, (2.0, 2.0)).startswith(b"\x89PNG")
    (page,) = Page(page_html(name, []).decode()).text["title"]
    assert page == name.replace("\udcff", "\N{REPLACEMENT CHARACTER}")


def letters_px(figure, width_px):
    """The height in pixels of the smallest letters of a figure at a width on the page."""
    texts = [text for text in figure.findobj(matplotlib.text.Text) if text.get_text()]
    assert texts
    return min(text.get_fontsize() for text in texts) / 72 * width_px / figure.get_figwidth()


def test_letters_can_be_read_on_a_narrow_page_and_a_wide_one(monkeypatch):
    """A page of 500 pixels leaves 434 to a figure; from 768 the wide one is shown, in 702."""
    drawn = []
    finished = figures.finished_png
    monkeypatch.setattr(
        figures,
        "finished_png",
        lambda *args: drawn.append(args[0]) or finished(*args),
    )
    rows = [train_row(s, loss=9.0 if s == 1 else 2.0 + 1 / s) for s in range(1, 100)]
    metrics = RunMetrics(rows, [held_out_row(99)])
    theme = figures.LIGHT
    for size, width_px in (
        (figures.NARROW, 434),
        (figures.WIDE, 702),
    ):
        figures.loss_png(metrics, "run", theme, size)
        assert letters_px(drawn[-1], width_px) >= 11
        # The page says which values are out of sight.
        notes = [text.get_text() for text in drawn[-1].findobj(matplotlib.text.Text)]
        assert any(re.fullmatch(r"cut off at 2\.\d+; the highest is 9", note) for note in notes)
    figures.details_png("gradient norm", [1.0, 2.0], [0.5, 0.7], theme)
    assert letters_px(drawn[-1], 434) >= 11
    assert "(max-width: 48rem)" in figure_html("", [b"", b""], [b"", b""])


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("skipped", [0, 2])
def test_skipped_steps_have_a_panel_if_there_are_any(skipped, tmp_path):
    make_run(tmp_path, [train_row(s, skipped_steps=skipped) for s in (1, 2)])
    report(tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert 'alt="Gradient norm"' in text
    assert ('alt="Skipped steps"' in text) == bool(skipped)


@pytest.mark.usefixtures("no_plots")
def test_comparison_has_any_name_in_its_legend(tmp_path, monkeypatch):
    monkeypatch.setattr(compare, "_panel_png", lambda *args: b"")
    names = [r"lr$\foo$", "_x"]
    first, second = (make_run(tmp_path / name, [train_row(1)], {}) for name in names)
    compare.write_comparison(first, second, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    legend = Page(re.findall(r'<ul class="legend">.*?</ul>', text)[0]).text
    assert legend["li"] == [f" {name}" for name in names]


def test_a_comparison_draws_both_runs_and_tells_what_is_cut_off(monkeypatch):
    finished = []
    monkeypatch.setattr(compare, "finished_png", lambda *args: finished.append(args) or b"")
    rows = [train_row(s, loss=9.0 if s == 1 else 2.0 + 1 / s) for s in range(1, 100)]
    runs = [RunMetrics(rows, []), RunMetrics(rows[:50], [])]
    compare._panel_png("loss", "training loss", runs, figures.LIGHT)
    ((figure, (axes,), _),) = finished
    assert len(axes.lines) == 2
    assert "cut off at" in axes.get_title(loc="left")
    assert letters_px(figure, 434) >= 11


@pytest.mark.usefixtures("no_plots")
def test_a_full_disk_at_the_report_names_the_file_and_leaves_the_old_one(tmp_path, monkeypatch):
    run_dir = make_run(tmp_path, [train_row(1)])
    report(run_dir)
    before = (run_dir / "report.html").read_bytes()

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(train.reporting.rows.os, "fsync", full)
    with pytest.raises(RunError, match=r"loss\.png: No space left on device$"):
        report(run_dir)
    assert (run_dir / "report.html").read_bytes() == before
    assert not list(run_dir.glob("*.tmp"))


@pytest.mark.usefixtures("no_plots")
def test_a_broken_row_of_samples_is_left_out_and_named(tmp_path):
    make_run(tmp_path, [train_row(1)])
    good = json.dumps({"step": 1, "heading": "h", "text": "the text"})
    (tmp_path / "samples.jsonl").write_text(f"{{broken\n{good}\n")
    with pytest.warns(UserWarning, match=r"samples\.jsonl:1 is no row"):
        assert "the text" in report(tmp_path).text["pre"]


@pytest.mark.usefixtures("no_plots")
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
    # Loss and speed on wide and narrow pages, and panels of gradient norm, learning rate, memory.
    assert len(images) == 4 + 2 * 3 and len(set(images)) == len(images)
    assert all(image.startswith(b"\x89PNG") for image in images)
    text = (run_dir / "report.html").read_text()
    assert not re.search(r"https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text


@pytest.fixture
def light_and_narrow(monkeypatch):
    """Draws a figure once: those for a dark page and a wide one have other colours and sizes."""

    def less(draw):
        left_out = figures.DARK, figures.WIDE
        return lambda *args: b"" if any(arg in left_out for arg in args) else draw(*args)

    for name in ("loss_png", "details_png"):
        monkeypatch.setattr(
            train.reporting.report, name, less(getattr(train.reporting.report, name))
        )


@pytest.mark.usefixtures("light_and_narrow")
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


@pytest.mark.usefixtures("no_plots")
def test_report_of_a_run_that_died(tmp_path):
    make_run(tmp_path, [train_row(s) for s in range(1, 5)], {"seed": 1})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.')
    with pytest.warns(UserWarning, match="incomplete last line"):
        page = report(tmp_path)
    assert tiles(page)["Training loss"] == "2.2500"


@pytest.mark.usefixtures("no_plots")
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


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(DiskError, match=r"/none/page\.html: No such file or directory$"):
        write_whole(tmp_path / "none" / "page.html", b"")
