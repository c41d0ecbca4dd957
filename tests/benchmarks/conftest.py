"""Fixtures to run benchmarks without a GPU."""

import functools

import pytest

from benchmarks import libraries, peers, timing
from benchmarks.kernels import formulas


@pytest.fixture
def two_ms_a_call(monkeypatch):
    """Replaces the timing, which needs a GPU: calls run, and each of them counts as 2 ms."""

    def measure(calls):
        for call in calls:
            call()
        return 2.0 * len(calls)

    monkeypatch.setattr(timing, "compare", functools.partial(timing.compare, measure=measure))


@pytest.fixture
def peers_in_jax(monkeypatch):
    """Replaces PyTorch's peers by their formulas: one is right, one errs in its last array."""

    def prepare(peer, sets, direction):
        of_peer = formulas.exact(peer.formula, sets[0])
        names = peer.formula.outputs
        if direction != "forward":
            names = *names, *(f"d{name}" for name in peer.formula.gradients)
        results = {name: of_peer[name] for name in names}
        if peer.name == "wrong":
            results[names[-1]] *= 1.03
        run = lambda: results
        return peers.Prepared([run], lambda: 2**30)

    of_op = {peer.op: peer.formula for peer in libraries.PEERS}
    monkeypatch.setattr(
        peers,
        "peers_of",
        lambda op: [
            peers.Peer(op, name, "torch", of_op[op], lambda: of_op[op].fn)
            for name in ("right", "wrong")
            if op in of_op
        ],
    )
    monkeypatch.setattr(peers, "prepare", prepare)
    monkeypatch.setattr(peers, "reset", lambda: None)
    monkeypatch.setattr(peers, "to_jax", lambda tensors: tensors)
    monkeypatch.setattr(peers, "missing", lambda: ["torch", "tokamax"])
