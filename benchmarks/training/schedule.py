"""Reads the collectives of a compiled program, and the GEMMs that are scheduled beside them.

The source is the text of the optimized HLO, whose instructions stand in the order of execution.
"""

import dataclasses
import functools
import math
import re
from collections import Counter
from collections.abc import Sequence

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_BRANCHES = r"(?:(?:true|false)_computation=%[\w.-]+|branch_computations=\{[^}]*\})"
type _Shape = tuple[str, tuple[int, ...]]


def kernel_calls(hlo: str) -> Counter[str]:
    """How often a program calls Mosaic GPU kernels, by their names; a loop's body counts once.

    Raises:
      ValueError: A call has no name.
    """
    calls = re.findall(r'custom_call_target="mosaic_gpu.*', hlo)
    names = [name for call in calls for name in re.findall(r'op_name="([^"]*)"', call)[:1]]
    if len(names) < len(calls):
        raise ValueError(f"{len(calls) - len(names)} calls of kernels have no op_name")
    # The last part is JAX's primitive. The one before may be `jit(name)`.
    parts = [name.split("/") for name in names]
    return Counter(re.findall(r"\w+", (part[-2:-1] or part)[0])[-1] for part in parts)


@dataclasses.dataclass(frozen=True)
class Collective:
    """A collective in a schedule.

    Attributes:
      kind: One of `KINDS`.
      results: Shapes of its results; it has several if XLA combined collectives.
      computation: Name of the loop body or program that contains it.
      nbytes: Bytes of its larger side, operands or results.
      wire_bytes: Bytes that a device receives from the others, in a ring. All-reduces and
        all-to-alls count as in a ring of many devices; between two devices they receive half.
      times: Number of runs in a step.
      is_async: Whether other work may run beside it.
      flops: FLOPs of GEMMs and attention between its start and its end.
    """

    kind: str
    results: tuple[tuple[int, ...], ...]
    computation: str
    nbytes: int
    wire_bytes: float
    times: int
    is_async: bool
    flops: float


@dataclasses.dataclass(frozen=True)
class _Line:
    name: str
    outputs: tuple[_Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    called: tuple[str, ...]
    branches: tuple[str, ...]
    text: str

    @property
    def dims(self) -> tuple[int, ...]:
        """Shape of the first result."""
        return self.outputs[0][1] if self.outputs else ()


class Schedule:
    """The schedule of an optimized HLO module, from its text."""

    def __init__(self, hlo: str):
        self._computations: dict[str, list[_Line]] = {}
        self._shapes: dict[str, tuple[_Shape, ...]] = {}
        found = re.findall(r"^(ENTRY )?%(\S+) \(.*\{\n((?:  .*\n)*)\}", hlo, re.MULTILINE)
        for entry, name, body in found:
            lines = [_parse(line) for line in body.splitlines()]
            self._computations[name] = lines
            self._shapes |= {line.name: line.outputs for line in lines}
            if entry:
                self._entry = name
        self._flops = functools.cache(self._flops_of_computation)

    def collectives(self) -> list[Collective]:
        """All collectives, in the order of the schedule, those of every branch among them."""
        return self._collectives(self._entry, 1)

    def exchanged(self) -> Counter[str]:
        """The elements of the results of all collectives, on one device, by the kind."""
        found: Counter[str] = Counter()
        for collective in self.collectives():
            found[collective.kind] += collective.times * sum(map(math.prod, collective.results))
        return found

    def seconds(self, bytes_per_s: float, flops_per_s: float) -> tuple[float, float]:
        """Seconds of the exchange at these rates, and its seconds in which nothing is computed.

        Collectives take the link one after the other, in the order in which they start. Work other
        than GEMMs and attention is taken to cost nothing.
        """
        now = link_free = exchange = waits = 0.0
        ends: dict[str, float] = {}

        def run(computation: str) -> None:
            nonlocal now, link_free, exchange, waits
            for line in self._computations[computation]:
                end = None
                if line.opcode in ("while", "call", "conditional"):
                    for _ in range(_trip_count(line)):
                        for called in line.called:
                            run(called)
                elif found := self._collective(line, computation, 1):
                    exchange += found.wire_bytes / bytes_per_s
                    link_free = max(now, link_free) + found.wire_bytes / bytes_per_s
                    if found.is_async:
                        ends[line.name] = link_free
                    else:
                        end = link_free
                elif line.opcode.endswith("-done"):
                    end = ends.pop(line.operands[0], None)
                else:
                    now += self._flops_of(line) / flops_per_s
                if end is not None and end > now:
                    waits, now = waits + end - now, end

        run(self._entry)
        return exchange, waits

    def _collectives(self, computation: str, times: int) -> list[Collective]:
        found, lines = [], self._computations[computation]
        for i, line in enumerate(lines):
            if line.opcode in ("while", "call", "conditional"):
                for called in (*line.called, *line.branches):
                    found += self._collectives(called, times * _trip_count(line))
            elif collective := self._collective(line, computation, times):
                if collective.is_async:
                    flops = self._flops_until_done(line.name, lines[i + 1 :])
                    collective = dataclasses.replace(collective, flops=flops)
                found.append(collective)
        return found

    def _collective(self, line: _Line, computation: str, times: int) -> Collective | None:
        """The collective that a line starts, with `flops` 0; None if it starts none."""
        if not (kind := self._kind(line)):
            return None
        starts = line.opcode.endswith("-start")
        sent = [shape for name in line.operands for shape in self._shapes[name]]
        # The start of a collective also returns its operands.
        got = line.outputs[len(sent) :][: len(sent)] if starts else line.outputs
        small, large = sorted((sum(map(_nbytes, sent)), sum(map(_nbytes, got))))
        wire = {"all-reduce": 2 * large, "all-to-all": large, "collective-permute": large}
        return Collective(
            kind=kind,
            results=tuple(dims for _, dims in got),
            computation=computation,
            nbytes=large,
            wire_bytes=wire.get(kind, large - small),
            times=times,
            is_async=starts and '"is_sync":true' not in line.text,
            flops=0.0,
        )

    def _kind(self, line: _Line) -> str | None:
        opcode = line.opcode.removesuffix("-start")
        if opcode == "async":  # a collective whose kind has no start instruction
            opcodes = [inner.opcode for inner in self._computations[line.called[0]]]
        else:
            opcodes = [opcode]
        return next((kind for kind in KINDS if kind in opcodes), None)

    def _flops_until_done(self, start: str, lines: Sequence[_Line]) -> float:
        flops = 0.0
        for line in lines:
            if line.opcode.endswith("-done") and line.operands[0] == start:
                break
            flops += self._flops_of(line)
        return flops

    def _flops_of_computation(self, name: str) -> float:
        return sum(map(self._flops_of, self._computations[name]))

    def _flops_of(self, line: _Line) -> float:
        shapes = [self._shapes[name][0][1] for name in line.operands if self._shapes.get(name)]
        sizes = line.dims
        if line.opcode == "dot" or "__cublas$" in line.text:
            (dims,) = re.findall(r'lhs_contracting_dim\w+"?[=:][{\[]([\d,"]+)', line.text)[:1]
            contracted = [shapes[0][int(dim)] for dim in re.findall(r"\d+", dims)]
            return 2.0 * math.prod(sizes) * math.prod(contracted)
        if "__cudnn$fmha" in line.text:
            products = 5 if "Backward" in line.text else 2
            return products * math.prod(sizes) * sizes[-2]  # causal, for [B, N, S, H]
        if 'custom_call_target="mosaic_gpu' in line.text:
            # [M, K] times each [K, N] or [N, K]. Kernels of norms have no two such operands.
            if len(sizes) != 2 or len(shapes) < 2 or len(shapes[0]) != 2:
                return 0.0
            inner = next((k for k in shapes[0] if k not in sizes), 0)
            weights = [s for s in shapes[1:] if sorted(s) == sorted((inner, sizes[1]))]
            return 2.0 * math.prod(sizes) * inner * len(weights)
        if line.opcode in ("fusion", "while", "call", "conditional", "async-start"):
            return _trip_count(line) * sum(map(self._flops, line.called))
        return 0.0


def _parse(text: str) -> _Line:
    found = re.match(r"\s*(?:ROOT )?%(\S+) = (.*?) ([\w-]+)\((.*)", text)
    assert found is not None, text
    name, outputs, opcode, rest = found.groups()
    called = re.findall(r"(?:calls|body|to_apply)=%([\w.-]+)", rest)
    return _Line(
        name,
        tuple(
            (dtype, tuple(int(size) for size in dims.split(",") if size))
            for dtype, dims in re.findall(r"(\w+)\[([\d,]*)\]", outputs)
        ),
        opcode,
        tuple(re.findall(r"%([\w.-]+)", rest.split(")", 1)[0])),
        tuple(called),
        tuple(re.findall(r"%([\w.-]+)", " ".join(re.findall(_BRANCHES, rest)))),
        re.sub(r'(custom_call_target="mosaic_gpu\w*").*', r"\1", text),  # drops the binary
    )


def _trip_count(line: _Line) -> int:
    found = re.search(r'known_trip_count":\{"n":"(\d+)"', line.text)
    return int(found[1]) if found else 1


def _nbytes(shape: _Shape) -> int:
    bits = re.search(r"\d+", shape[0])  # as in "f8e4m3fn"; "pred" takes a byte
    return (int(bits[0]) if bits else 8) * math.prod(shape[1]) // 8
