"""The package's public names, its version, and the versions of JAX that it takes."""

import importlib
import importlib.metadata
import importlib.util
import inspect
import pathlib
import tomllib
import types

import jax
import pytest

import pallas_kernels
from pallas_kernels import _version

ROOT = pathlib.Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_public_name_has_a_docstring_with_a_summary_line():
    names = pallas_kernels.__all__
    assert names == sorted(names)
    for name in names:
        if name != "__version__":
            summary, *rest = str(inspect.getdoc(getattr(pallas_kernels, name))).splitlines()
            assert summary.endswith((".", ":")) and (not rest or not rest[0]), name
            # The summary of the package has a line for each.
            assert f"`{name}`" in str(pallas_kernels.__doc__), name


def test_the_list_has_all_public_names():
    others = {name for name in vars(pallas_kernels) if name[0] != "_"} - {*pallas_kernels.__all__}
    assert all(isinstance(getattr(pallas_kernels, name), types.ModuleType) for name in others)


def test_folders_are_modules_and_operations_are_functions():
    for folder in ("norm", "mlp", "loss", "sharded_norm", "gpu"):
        assert inspect.ismodule(getattr(pallas_kernels, folder))
        assert importlib.import_module(f"pallas_kernels.{folder}").__doc__
    import pallas_kernels.norm.config as config

    assert config.Config is importlib.import_module("pallas_kernels.norm").Config
    for operation in ("rms_norm", "add_rms_norm", "swiglu", "swiglu_mlp", "sharded_add_rms_norm"):
        assert inspect.isfunction(getattr(pallas_kernels, operation))


def test_the_version_is_that_of_the_installed_package(monkeypatch):
    assert pallas_kernels.__version__ in (PROJECT["version"], "0+unknown")

    def version(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert _version.package_version() == "0+unknown"


def test_the_range_of_jax_is_that_of_pyproject():
    least, end = (".".join(map(str, version)) for version in _version.SUPPORTED_JAX)
    assert f"jax>={least},<{end}" in PROJECT["dependencies"]


@pytest.mark.parametrize(
    "version, fits",
    [
        ((0, 10, 9), False),
        (_version.SUPPORTED_JAX[0], True),
        ((0, 12, 99), True),
        (_version.SUPPORTED_JAX[1], False),
        ((1, 0, 0), False),
    ],
    ids=str,
)
def test_a_jax_that_does_not_fit_is_refused_at_import(monkeypatch, version, fits):
    monkeypatch.setattr(jax, "__version_info__", version)
    monkeypatch.setattr(jax, "__version__", ".".join(map(str, version)))
    # A module of another name runs the package's first import again.
    spec = importlib.util.spec_from_file_location("_version_again", _version.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if fits:
        spec.loader.exec_module(module)
        return
    message = rf"needs jax>=0\.\S+,<0\.13, and jax {jax.__version__} is installed; run: pip install"
    with pytest.raises(ImportError, match=message):
        spec.loader.exec_module(module)
