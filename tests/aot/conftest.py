"""Compiles the cases of a module's selected tests before the first of them, on all cores."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from aot.harness import Failure, Program, compile_cases, missing_toolchain

type Compiled = Callable[[str, str], Program]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> Iterator[Compiled]:
    """A function that gives the program of a chip and a case of the module's `CASES`.

    A test that asks for a case that does not compile fails with the compiler's message.
    """
    if reason := missing_toolchain():
        # `make test-aot` installs it, and must not pass if nothing was checked.
        (pytest.fail if "AOT_REQUIRED" in os.environ else pytest.skip)(reason)
    selected: dict[str, list[str]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.module is request.module:
            params = item.callspec.params
            # A test that compares two cases has a `baseline`.
            cases = [str(params[name]) for name in ("case", "baseline") if name in params]
            selected.setdefault(str(params["chip"]), []).extend(cases)
    module = f"aot.{request.path.stem}"
    num_cores = os.cpu_count() or 1
    shares = max(1, num_cores // max(1, len(selected)))  # processes for the cases of a chip
    programs: dict[tuple[str, str], Future[dict[str, Program | Failure]]] = {}
    with ThreadPoolExecutor(max_workers=num_cores) as pool:
        for chip, cases in selected.items():
            for share in filter(None, (cases[i::shares] for i in range(shares))):
                future = pool.submit(compile_cases, chip, module, share)
                programs |= {(chip, case): future for case in share}

        def get(chip: str, case: str) -> Program:
            program = programs[chip, case].result()[case]
            if isinstance(program, Failure):
                pytest.fail(program.message, pytrace=False)
            return program

        yield get
