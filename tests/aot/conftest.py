"""Compiles the cases of all selected tests before the first of them, on all cores."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from aot.harness import Failure, Program, compile_cases, missing_toolchain

type Compiled = Callable[[str, str], Program]
type Programs = dict[tuple[str, str, str], Future[dict[str, Program | Failure]]]


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Iterator[Programs]:
    """The programs by module, chip and case. A module has a process for each chip.

    A process compiles kernels of equal code once, so a module is only split where cores are free.
    """
    if reason := missing_toolchain():
        # `make test-aot` installs it, and must not pass if nothing was checked.
        (pytest.fail if "AOT_REQUIRED" in os.environ else pytest.skip)(reason)
    selected: dict[tuple[str, str], dict[str, None]] = {}  # several tests may read a program
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "compiled" in item.fixturenames:
            params = item.callspec.params
            # A test that compares two cases has a `baseline`.
            cases = [str(params[name]) for name in ("case", "baseline") if name in params]
            group = selected.setdefault((f"aot.{item.path.stem}", str(params["chip"])), {})
            group |= dict.fromkeys(cases)
    num_cores = os.cpu_count() or 1
    shares = max(1, num_cores // max(1, len(selected)))  # processes for a module and a chip
    programs: Programs = {}
    with ThreadPoolExecutor(max_workers=num_cores) as pool:
        for (module, chip), cases in selected.items():
            for share in filter(None, (list(cases)[i::shares] for i in range(shares))):
                future = pool.submit(compile_cases, chip, module, share)
                programs |= {(module, chip, case): future for case in share}
        yield programs


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, programs: Programs) -> Compiled:
    """A function that gives the program of a chip and a case of the module's `CASES`.

    A test that asks for a case that does not compile fails with the compiler's message.
    """

    def get(chip: str, case: str) -> Program:
        program = programs[f"aot.{request.path.stem}", chip, case].result()[case]
        if isinstance(program, Failure):
            pytest.fail(program.message, pytrace=False)
        return program

    return get
