"""Compiles the cases of a module's selected tests before the first of them, chips side by side."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from aot.harness import Failure, Program, compile_cases, missing_toolchain

type Compiled = Callable[[str, str], Program]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    """The program of a chip and a case of the module's `CASES`; a case that fails, fails here."""
    if reason := missing_toolchain():
        # `make test-aot` has installed it; to skip there would hide that nothing is checked.
        (pytest.fail if "AOT_REQUIRED" in os.environ else pytest.skip)(reason)
    selected: dict[str, list[str]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            chip, case = (str(item.callspec.params[name]) for name in ("chip", "case"))
            selected.setdefault(chip, []).append(case)
    module = f"aot.{request.path.stem}"
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        programs: dict[str, Future[dict[str, Program | Failure]]] = {
            chip: pool.submit(compile_cases, chip, module, cases)
            for chip, cases in selected.items()
        }

        def get(chip: str, case: str) -> Program:
            program = programs[chip].result()[case]
            if isinstance(program, Failure):
                pytest.fail(program.message, pytrace=False)
            return program

        yield get
