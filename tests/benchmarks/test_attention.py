"""The benchmark of attention without a GPU: the formula, the checks, the figures and the table."""

import functools
import json
import sys
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import ceilings, libraries, peers, timing
from benchmarks.kernels import attention, documents, formulas
from benchmarks.kernels.attention import DIRECTIONS, Variant

SHAPE = (2, 32, 6, 2, 16)
SHAPE_LABEL = "2x32x6x2x16"


def attend(q, k, v, *, is_causal=True, scale=1.0):
    in_float32 = (a.astype(jnp.float32) for a in (scale * q, k, v))
    return formulas.attention(*in_float32, is_causal=is_causal).astype(q.dtype)


full = functools.partial(attend, is_causal=False)
# The formula divides by the root of the head size.
unscaled = functools.partial(attend, scale=4.0)


def measure(variants, *, with_peers=False):
    programs = [(SHAPE, v, d) for v in variants for d in v.directions]
    compiled = attention.compile_all(programs)
    return attention.measure(SHAPE, compiled, with_peers=with_peers, rounds=2)


@pytest.mark.full
def test_the_formula_is_jaxs():
    """2 s."""
    rng = np.random.default_rng(0)
    arrays = {
        name: jnp.asarray(rng.standard_normal(spec.shape), jnp.float32)
        for name, spec in documents.specs_of(SHAPE).items()
    }
    by_jax = functools.partial(jax.nn.dot_product_attention, is_causal=True)
    variant = Variant("", "", by_jax, dtype=jnp.float32)
    got = variant.program("forward+backward")(*variant.arguments(arrays))
    expected = formulas.exact(formulas.ATTENTION, arrays)
    assert got.keys() == expected.keys()
    for name, array in got.items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.full
@pytest.mark.usefixtures("two_ms_a_call")
def test_contenders_are_checked_before_they_are_timed():
    """4 s."""

    def unsupported(q, k, v):
        raise NotImplementedError("no such mask")

    records = measure(
        [
            Variant("right", "", attend),
            Variant(
                "unscaled", "", unscaled, DIRECTIONS[1:], scales_logits=False, dtype=jnp.float16
            ),
            Variant("full", "", full, DIRECTIONS[:1], formulas.FULL_ATTENTION),
            Variant("wrong", "", full, DIRECTIONS[:1]),
            Variant("absent", "", unsupported, DIRECTIONS[:1]),
        ]
    )
    assert [r["median_ms"] for r in records[:4]] == [2.0] * 4
    # 4 x 2 x 6 x 32² x 16 operations, of which a causal mask leaves half.
    forward = 786_432 / 2e-3 / 1e12
    expected = [forward / 2, 1.75 * forward, 1.75 * forward, forward]
    assert [r["tflops"] for r in records[:4]] == pytest.approx(expected)
    assert records[4]["error"].startswith("wrong result: relative error")
    assert records[5]["error"] == "NotImplementedError: no such mask"


def test_the_table_has_the_fastest_tiles_and_the_failures():
    def record(direction, tiles, **measured):
        row = {"contender": "a", "tiles": tiles, "direction": direction, "is_causal": True}
        return {"shape": list(SHAPE), **row, **measured}

    work = attention.operations(SHAPE, "forward", is_causal=True)
    timed = lambda ms: {"median_ms": ms, "tflops": work / ms / 1e9}
    lines = attention.table(
        [
            record("forward", "64x64", **timed(3e-7)),
            record("forward", "64x128", **timed(2e-7)),
            record("forward", "64x256", error="too large"),
            record("forward+backward", "128x64", **timed(7e-7)),
        ]
    ).splitlines()
    (row,) = (line for line in lines if line.startswith("| a |"))
    rates = [f"{work / 1e9 / ms:.0f}" for ms in (2e-7, 7e-7, 5e-7 / 2.5)]
    cells = [f"{ms:.3f} ({rate})" for ms, rate in zip((2e-7, 7e-7, 5e-7), rates, strict=True)]
    assert row == f"| a | {' | '.join(cells)} | 64x128; 128x64 |"
    assert "- a, 64x256, forward: too large" in lines


def test_rows_have_as_many_documents_as_asked_for():
    batch_size, length, num_documents = 3, 40, 5
    key = jax.random.key(1)
    ids = np.asarray(documents.random_segment_ids(key, batch_size, length, num_documents))
    assert all(set(row) == set(range(num_documents)) for row in ids)
    assert (np.diff(ids, axis=1) >= 0).all() and len({tuple(row) for row in ids}) > 1
    positions = documents.positions_of(jnp.asarray(ids))
    for row, of_tokens in zip(ids, positions, strict=True):
        expected = np.concatenate([*map(np.arange, np.bincount(row))])
        np.testing.assert_array_equal(of_tokens, expected)


def test_the_formula_of_documents_is_that_of_each_alone():
    """2 s."""
    rng = np.random.default_rng(0)
    specs = documents.specs_of((2, 12, 4, 2, 8))
    q, k, v = (jnp.asarray(rng.standard_normal(specs[n].shape), jnp.float32) for n in "qkv")
    ids = jnp.asarray([[0] * 5 + [1] * 7, [0] * 1 + [1] * 11], jnp.int32)
    got = formulas.attention(q, k, v, ids)
    for row, cut in enumerate((5, 1)):
        for part in (slice(cut), slice(cut, None)):
            alone = formulas.attention(*(a[row : row + 1, part] for a in (q, k, v)))
            np.testing.assert_allclose(got[row, part], alone[0], rtol=1e-5, atol=1e-6)


def test_a_row_has_at_most_a_document_for_each_token():
    for number in ("0", "33"):
        with pytest.raises(SystemExit, match=r"^2$"):
            attention.main(["--documents", number, "--shapes", SHAPE_LABEL])


def fused_attn(qkv, *, sequence_descriptor, scaling_factor, max_segments_per_seq, **_):
    """The attention of TransformerEngine, whose documents count from 1."""
    numbers, positions = sequence_descriptor
    is_token = (numbers > 0) & (numbers <= max_segments_per_seq)
    mask = (numbers[:, :, None] == numbers[:, None]) & is_token[:, None]
    mask &= positions[:, :, None] >= positions[:, None]
    q, k, v = (a.astype(jnp.float32) for a in qkv)
    out = jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], scale=scaling_factor)
    return jnp.where(is_token[:, :, None, None], out, 0).astype(qkv[0].dtype)


@pytest.mark.usefixtures("two_ms_a_call")
@pytest.mark.parametrize("is_installed", [True, False])
def test_transformer_engine_is_a_peer_on_rows_of_documents(tmp_path, monkeypatch, is_installed):
    """The formula of its attention replaces its module. 4 s."""
    module = MagicMock(fused_attn=fused_attn)
    module.SequenceDescriptor.from_segment_ids_and_pos = lambda *arrays: arrays
    monkeypatch.setitem(sys.modules, "transformer_engine.jax.attention", module)
    installed = ["transformer-engine"] if is_installed else []
    monkeypatch.setattr(peers, "missing", lambda: sorted({*peers.PACKAGES} - {*installed}))
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.0")
    monkeypatch.setattr(timing, "require_gpu", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(ceilings, "measure", lambda: "no ceilings")
    # Both directions count as 2 ms, so the table would divide by a backward of 0 ms.
    monkeypatch.setattr(attention, "table", str)
    flags = ["--documents", "3", "--peers", "--shapes", SHAPE_LABEL, "--rounds", "2"]
    attention.main([*flags, "--output-dir", str(tmp_path)])
    (path,) = tmp_path.glob("attention_documents_3_h100_*.json")
    records = json.loads(path.read_text())["records"]
    found = [r["median_ms"] for r in records if r["contender"] == "TransformerEngine, packed"]
    assert found == ([2.0, 2.0] if is_installed else [])


@pytest.mark.full
@pytest.mark.usefixtures("two_ms_a_call", "peers_in_jax")
def test_peers_are_checked_too(monkeypatch):
    """2 s."""
    monkeypatch.setattr(attention, "DIRECTIONS", DIRECTIONS[1:])
    right, wrong = measure([], with_peers=True)
    assert right["median_ms"] == 2.0 and right["direction"] == "forward+backward"
    assert wrong["error"].startswith("wrong result: relative error 3.")


@pytest.mark.usefixtures("two_ms_a_call")
def test_the_program_writes_a_table(tmp_path, capsys, monkeypatch):
    """1 s."""
    monkeypatch.setattr(timing, "require_gpu", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(ceilings, "measure", lambda: "no ceilings")
    variant = Variant("formula", "", attend, DIRECTIONS[:1])
    monkeypatch.setattr(attention, "variants", lambda **_: [variant])
    attention.main(["--shapes", SHAPE_LABEL, "--rounds", "2", "--output-dir", str(tmp_path)])
    (path,) = tmp_path.glob("attention_h100_*.json")
    assert len(json.loads(path.read_text())["records"]) == 1
    assert "| formula | 2.000 (0) | | | |" in capsys.readouterr().out


def test_the_formula_of_a_window_is_jaxs():
    cudnn, ours = attention.of_window(5)
    assert (cudnn.name, ours.name) == ("cuDNN", "ours") and cudnn.formula == ours.formula
    rng = np.random.default_rng(0)
    specs = documents.specs_of((2, 12, 4, 2, 8))
    q, k, v = (jnp.asarray(rng.standard_normal(specs[n].shape), jnp.float32) for n in "qkv")
    expected = jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(4, 0))
    np.testing.assert_allclose(cudnn.formula.fn(q, k, v), expected, rtol=1e-5, atol=1e-6)
    bounds = documents.document_bounds(jnp.zeros((2, 12), jnp.int32), window=5)
    got = documents.document_attention(q, k, v, bounds)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


def test_contenders_are_named_as_they_are(monkeypatch, capsys):
    monkeypatch.setattr(timing, "require_gpu", lambda: "NVIDIA H100")
    monkeypatch.setattr(ceilings, "measure", lambda: "ceilings")
    with pytest.raises(SystemExit):
        attention.main(["--contenders", "ours", "cuDNNN"])
    assert "['cuDNNN'] must be among ['cuDNN', 'ours'," in capsys.readouterr().err


def test_a_shape_has_five_sizes():
    with pytest.raises(SystemExit):
        attention.main(["--shapes", "4x4096x32x64"])


def test_the_tiles_of_jax_exist():
    """JAX's own kernels take the tiles that the benchmark asks for, and cuDNN the documents."""
    assert {v.name for v in attention.variants(with_tokamax=False)} >= {"cuDNN", "JAX, float16"}
    assert {p.name for p in libraries.PEERS if p.op == "attention"} >= {"PyTorch, cuDNN"}
    found = [v.name for v in attention.of_documents(8, with_transformer_engine=False)]
    assert list(dict.fromkeys(found)) == ["cuDNN, whole rows", "cuDNN, mask", "ours"]
