"""The benchmark of a mesh of CPU devices. 3 s."""

from benchmarks.kernels import mesh


def test_both_losses_are_timed(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mesh", "--shape", "32x8x16", "--rounds", "2"])
    mesh.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["plain JAX", "linear_cross_entropy"]
    assert lines[0].endswith("1.00")
