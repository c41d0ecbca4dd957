"""Compiles the cases of all selected tests before the first of them, on all cores."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from aot.harness import Failure, Program, compile_cases, missing_toolchain

type Compiled = Callable[[str, str], Program]
type Programs = dict[tuple[str, str, str], Future[dict[tuple[str, str], Program | Failure]]]

# Modules with kernels in common, and short ones. One process compiles them all. It takes 1.4 s to
# start, and the last two groups have eight such starts less on each JAX.
TOGETHER = (
    ("test_aot_linear_cross_entropy", "test_aot_log_probs", "test_aot_loss_kernels"),
    (
        "test_aot_log_probs_on_meshes",
        "test_aot_mesh_transformer",
        "test_aot_meshes",
        "test_aot_x64",
    ),
    ("test_aot_frameworks", "test_aot_patching"),
    ("test_aot_fp8", "test_aot_fp8_quantize"),
    ("test_aot_fp8_llama", "test_aot_llama"),
    ("test_aot_members", "test_aot_sharded_add_rms_norm", "test_aot_slices"),
    ("test_aot_rms_norm", "test_aot_swiglu"),
    ("test_aot_attention", "test_aot_attention_backward", "test_aot_document_attention"),
)


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Iterator[Programs]:
    """The programs by module, chip and case. A module, or some together, has a process a chip.

    A process compiles kernels of equal code once, so a module is only split where cores are free.
    """
    if reason := missing_toolchain():
        # `make test-aot` installs it, and must not pass if nothing was checked.
        (pytest.fail if "AOT_REQUIRED" in os.environ else pytest.skip)(reason)
    together = {module: modules for modules in TOGETHER for module in modules}
    # Several tests may read a program.
    selected: dict[tuple[tuple[str, ...], str], dict[tuple[str, str], None]] = {}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and "compiled" in item.fixturenames:
            params = item.callspec.params
            # A test that compares two cases has a `baseline`.
            names = [str(params[name]) for name in ("case", "baseline") if name in params]
            module = item.path.stem
            modules = together.get(module, (module,))
            group = selected.setdefault((modules, str(params["chip"])), {})
            group |= dict.fromkeys((f"aot.{module}", name) for name in names)
    num_cores = os.cpu_count() or 1
    shares = max(1, num_cores // max(1, len(selected)))  # processes for some modules and a chip
    programs: Programs = {}
    with ThreadPoolExecutor(max_workers=num_cores) as pool:
        for (_, chip), cases in selected.items():
            for share in filter(None, (list(cases)[i::shares] for i in range(shares))):
                future = pool.submit(compile_cases, chip, share)
                programs |= {(module, chip, name): future for module, name in share}
        yield programs


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest, programs: Programs) -> Compiled:
    """A function that gives the program of a chip and a case of the module's `CASES`.

    A test that asks for a case that does not compile fails with the compiler's message.
    """

    def get(chip: str, case: str) -> Program:
        module = f"aot.{request.path.stem}"
        program = programs[module, chip, case].result()[module, case]
        if isinstance(program, Failure):
            pytest.fail(program.message, pytrace=False)
        return program

    return get
