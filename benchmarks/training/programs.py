"""Times compiled programs of the same arguments in turns, and makes a table of them."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import agreement, ceilings, command, tables, timing

_CALLS = 2  # of a program in a round


def report(
    prog: str, programs: Mapping[str, Any], args: Sequence[Any], rounds: int, output: Path | None
) -> None:
    """Prints and writes the card, its ceilings, a row for each program, and the command.

    Args:
      prog: Module of the benchmark.
      programs: Compiled programs by the names of their variants.
      args: Arguments of every program.
      rounds: Number of rounds, in each of which every program runs.
      output: File to write the table to, in Markdown; None for none.
    """
    device, limit = timing.require_gpu(), ceilings.measure()
    cases = [
        timing.Case(name, [functools.partial(program, *args)]) for name, program in programs.items()
    ]
    timings = timing.compare(cases, rounds=rounds, calls_per_round=_CALLS, measure=timing.wall_ms)
    rows = []
    for name, timed in timings.items():
        gib = f"{agreement.temporary_bytes(programs[name]) / 2**30:.1f} GiB"
        if timed.error is not None:
            rows.append([name, timed.error, "", gib])
            continue
        ms = timed.times_ms
        rows.append([name, f"{timed.median_ms:.1f}", f"{min(ms):.1f} - {max(ms):.1f}", gib])
    lines = [
        f"{device}, jax {jax.__version__}; {limit}",
        "",
        *tables.markdown(("variant", "ms", "min - max", "temporaries"), rows),
        "",
        f"    {command.line(prog)}",
        "",
    ]
    text = "\n".join(lines)
    print(text)
    if output:
        output.write_text(text)
