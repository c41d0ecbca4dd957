"""The benchmark of a mesh of CPU devices. 6 s."""

import pytest

from benchmarks.kernels import mesh


@pytest.mark.full
def test_each_way_to_call_is_timed(capsys, monkeypatch):
    monkeypatch.setitem(mesh.SIZES, "cpu", (8, 16, 32, 64, (64, 16, 48)))
    mesh.main(["--operations", "norm", "loss, FSDP", "--rounds", "2", "--calls", "1"])
    *_, head, _, norm, loss = capsys.readouterr().out.splitlines()
    assert head == "| | plain JAX | by hand | Auto | Explicit |"
    for line, name in ((norm, "norm"), (loss, "loss, FSDP")):
        _, found, plain, by_hand, auto, explicit, _ = map(str.strip, line.split("|"))
        assert found == name
        assert ", 1.000, " in by_hand
        for way in (plain, auto, explicit):
            difference = float(way.rpartition(", ")[2])
            assert difference < 1e-5, way
