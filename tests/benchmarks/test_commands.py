"""The published commands of the benchmarks name modules and flags that exist."""

import argparse
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The lab log keeps the commands of its time.
FOLDERS = ("benchmarks/results", "docs", "docs/kernels")
FILES = [path for folder in FOLDERS for path in (ROOT / folder).glob("*.md")]


class Parsing(Exception):
    """Carries a parser out of a program that is about to use it."""


def commands():
    """`(module, flags)` of each command in the files, without repetitions."""
    found = set()
    for path in FILES:
        text = path.read_text().replace("\\\n", " ")
        for module, arguments in re.findall(r"python -m (benchmarks(?:\.\w+)+)([^`#\n]*)", text):
            flags = [word for word in shlex.split(arguments) if word.startswith("--")]
            found.add((module, tuple(flags)))
    return sorted(found)


@pytest.mark.parametrize(("module", "flags"), commands())
def test_published_commands_exist(module, flags, monkeypatch):
    program = importlib.import_module(module)
    if not flags:
        assert callable(program.main)
        return

    def stop(parser, *_):
        raise Parsing(parser)

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [module])
    with pytest.raises(Parsing) as caught:
        program.main()
    (parser,) = caught.value.args
    assert set(flags) <= set(parser._option_string_actions)
