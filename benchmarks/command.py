"""The commands of the benchmarks: their arguments, the heads of their tables, and their files."""

import argparse
import dataclasses
import gc
import importlib.metadata
import json
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import ceilings, peers, timing
from benchmarks.kernels.shapes import Shape, label, parse


def parser(module: str, description: str | None) -> argparse.ArgumentParser:
    """The parser of `python -m MODULE`, whose help is the module's docstring as it is."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawTextHelpFormatter,
    )


def add_results(parser: argparse.ArgumentParser, *, rounds: int = 10) -> None:
    """Adds the number of rounds, with this default, and the folder of the results."""
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--output-dir", type=Path, default=Path("benchmarks/results"))


def line(program: str, argv: Sequence[str] | None = None) -> str:
    """The command line of a program with these arguments; None is for those of the process."""
    return f"{program} {shlex.join(sys.argv[1:] if argv is None else argv)}".strip()


def short_name(device_kind: str) -> str:
    """`h100` for "NVIDIA H100 80GB HBM3", `rtx4090` for "NVIDIA GeForce RTX 4090"."""
    name = device_kind.removeprefix("NVIDIA ").removeprefix("GeForce ").replace("RTX ", "RTX")
    return re.split(r"[ -]", name)[0].lower()


@dataclasses.dataclass(frozen=True)
class Run:
    """A run of a benchmark.

    Attributes:
      device: Kind of the GPU.
      date: Day of the run.
      versions: Packages and their versions.
      command: Command line.
      rounds: Number of measured rounds.
      ceilings: Limits of the card, in words.
      num_gpus: Number of GPUs.
    """

    device: str
    date: str
    versions: list[str]
    command: str
    rounds: int
    ceilings: str
    num_gpus: int = 1

    @classmethod
    def start(
        cls,
        parser: argparse.ArgumentParser,
        argv: Sequence[str] | None,
        rounds: int,
        *,
        with_peers: bool = False,
        num_gpus: int = 1,
    ) -> "Run":
        """Measures the limits of the card; ends the program if there is no GPU.

        Args:
          parser: Parser of the command.
          argv: Its arguments; None is for those of the process.
          rounds: Number of measured rounds.
          with_peers: Whether the versions of the packages of peers are named.
          num_gpus: Number of GPUs.
        """
        device = timing.require_gpu()
        packages = ("jax", "jaxlib", *(peers.PACKAGES if with_peers else ()))
        absent = peers.missing()
        versions = [f"{p} {importlib.metadata.version(p)}" for p in packages if p not in absent]
        return cls(
            device,
            time.strftime("%Y-%m-%d"),
            versions,
            line(parser.prog, argv),
            rounds,
            str(ceilings.measure()),
            num_gpus,
        )

    def heading(self, subject: str, what: str = "bfloat16, kernel time", note: str = "") -> str:
        """The head of a file of tables: the subject, what is measured, and the command."""
        device = f"{self.num_gpus} x {self.device}" if self.num_gpus > 1 else self.device
        return (
            f"# {subject} on {device}\n\n{self.date}, {device}, "
            f"{', '.join(self.versions)}. {what}, median of {self.rounds} interleaved rounds; "
            f"{self.ceilings} by wall time.{note}\n\n    {self.command}\n\n"
        )

    def contents(self, records: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The contents of the JSON file."""
        return dataclasses.asdict(self) | {"records": records}

    def write(self, folder: Path, name: str, contents: Any, text: str) -> None:
        """Writes `NAME_DEVICE_YYYYMM.json` and `.md`; the folder is made if there is none.

        DEVICE is such as `h100`, or `h100_x8` for several GPUs.

        Args:
          folder: Folder of the results.
          name: Beginning of the files' names.
          contents: All numbers, for the JSON file.
          text: Table in Markdown.
        """
        folder.mkdir(parents=True, exist_ok=True)
        device = short_name(self.device) + (f"_x{self.num_gpus}" if self.num_gpus > 1 else "")
        path = folder / f"{name}_{device}_{time.strftime('%Y%m')}"
        path.with_suffix(".json").write_text(json.dumps(contents, indent=1) + "\n")
        path.with_suffix(".md").write_text(text)


def add_settings(
    parser: argparse.ArgumentParser, shapes: Sequence[Shape], settings: Sequence[Any]
) -> None:
    """Adds the shapes, with these defaults, the names of settings, the peers and the results."""
    parser.add_argument("--shapes", nargs="+", type=parse, default=list(shapes))
    parser.add_argument("--settings", nargs="+", choices=[s.name for s in settings])
    parser.add_argument("--peers", action="store_true")
    add_results(parser)


def run_settings(
    parser: argparse.ArgumentParser,
    argv: Sequence[str] | None,
    args: argparse.Namespace,
    name: str,
    subject: str,
    measure: Callable[..., list[dict[str, Any]]],
    table: Callable[[Sequence[dict[str, Any]]], str],
) -> None:
    """Measures the shapes one after the other, and writes and prints their tables.

    The files are written after each shape, so that a failure loses only one.

    Args:
      parser: Parser of the command.
      argv: Its arguments; None is for those of the process.
      args: Arguments of `add_settings`.
      name: Beginning of the files' names.
      subject: Subject of the heading.
      measure: Function that makes the records of a shape, with peers or without.
      table: Function that makes a table in Markdown of records.
    """
    timing.require_gpu()
    if args.peers:
        peers.require_torch()
    run = Run.start(parser, argv, args.rounds, with_peers=args.peers)
    records = []
    for shape in args.shapes:
        print(f"{label(shape)} ...", file=sys.stderr, flush=True)
        of_shape = measure(shape, with_peers=args.peers, rounds=args.rounds)
        gc.collect()  # PyTorch's graphs hold their inputs in reference cycles
        jax.clear_caches()
        records += of_shape
        run.write(
            args.output_dir, name, run.contents(records), run.heading(subject) + table(records)
        )
        print(table(of_shape), flush=True)
