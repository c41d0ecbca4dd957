"""The tables and the command line of the benchmark of operations, and the peers."""

import json
import re

import pytest

from benchmarks import command, peers, timing
from benchmarks.kernels import bench, ops, tune


def _record(direction, columns):
    return bench.record((16, 32), direction, 3 * 10**9, timing.Timing([1.0]), columns)


def test_tables():
    columns = {
        "mosaic_gpu": timing.Timing([1.25, 1.0, 2.0]),
        "Liger": timing.Timing(error="ValueError: too wide"),
    }
    records = [
        _record("forward", columns),
        _record("backward", {"mosaic_gpu": timing.Timing([0.5])}),
    ]
    text = bench.markdown(json.loads(json.dumps(records)))
    forward, backward = text.split("## backward")
    assert "| shape | copy, GB/s | mosaic_gpu | Liger |\n|---|---|---|---|\n" in forward
    assert "| 16x32 | 3000 | 0.80 (1250) | failed |" in forward
    assert "| 16x32 | 3000 | 2.00 (500.0) |" in backward
    assert "- forward, 16x32, Liger: ValueError: too wide" in text


@pytest.mark.parametrize(
    ("kind", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L4", "l4"),
    ],
)
def test_short_names(kind, short):
    assert command.short_name(kind) == short


def test_results_are_written_as_numbers_and_as_a_table(tmp_path):
    run = command.Run("NVIDIA H100 80GB HBM3", "2026-11-21", ["jax 0.11.2"], "bench", 3, "fast", 8)
    run.write(tmp_path / "new", "swiglu", {"rounds": 3}, "# Table\n")
    table, numbers = sorted((tmp_path / "new").iterdir(), reverse=True)
    assert re.fullmatch(r"swiglu_h100_x8_20\d{4}\.md", table.name)
    assert numbers == table.with_suffix(".json")
    assert json.loads(numbers.read_text()) == {"rounds": 3}
    assert table.read_text() == "# Table\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--implementations", "reference", "cuDNN"], "rms_norm has no column named cuDNN"),
        (["--ops", "rms_norm", "--shapes", "8x8x8"], "rms_norm takes shapes such as 32768x2048"),
    ],
)
def test_flags_that_name_nothing_are_refused_before_measuring(argv, message, monkeypatch):
    monkeypatch.setattr(timing, "require_gpu", lambda: "NVIDIA L4")
    with pytest.raises(SystemExit, match=message):
        bench.main(argv)


def test_peers_that_are_not_installed_are_named_and_left_out(monkeypatch):
    versions = {"torch": "2.11", "triton": "3.6", "liger-kernel": None}
    monkeypatch.setattr(peers, "PACKAGES", tuple(versions))

    def version(name):
        if versions[name] is None:
            raise peers.importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(peers.importlib.metadata, "version", version)
    assert peers.versions() == versions
    assert peers.missing() == ["liger-kernel"]
    names = {peer.name for peer in peers.peers_of("add_rms_norm")}
    assert "torch.compile" in names and "Liger" not in names
    versions["torch"] = None
    assert peers.peers_of("add_rms_norm") == []


@pytest.mark.parametrize(
    ("package", "column"),
    [("tokamax", "tokamax"), ("transformer-engine", "TransformerEngine")],
)
def test_jax_peers_have_a_column_where_they_are_installed(monkeypatch, package, column):
    absent = ["torch"]
    monkeypatch.setattr(peers, "missing", lambda: absent)

    def names(op, *, with_peers):
        return [c[0] for c in bench.columns_of(ops.OPS[op], with_peers=with_peers, names=None)]

    assert column in names("rms_norm", with_peers=True)
    assert column not in names("rms_norm", with_peers=False)
    assert column not in names("add_rms_norm", with_peers=True)  # they have no such kernel
    absent.append(package)
    assert column not in names("rms_norm", with_peers=True)


def test_benchmarks_end_with_a_message_without_a_gpu():
    for main, argv in (
        (bench.main, []),
        (tune.main, ["rms_norm", "--hidden-sizes", "64"]),
        (tune.main, ["linear_cross_entropy", "--vocab-sizes", "64"]),
    ):
        with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
            main(argv)
