"""The version of the package, and a check of JAX's version that runs as the package is imported."""

import importlib.metadata

import jax

# The range in pyproject.toml, which pip reads: the first version or later, below the second.
SUPPORTED_JAX = (0, 11, 2), (0, 13)


def package_version() -> str:
    """The version of the installed package, or "0+unknown" in a checkout that is not installed."""
    try:
        return importlib.metadata.version("pallas-kernels")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def check_jax_version() -> None:
    """Raises ImportError if the installed JAX is too old or too new.

    Pallas changes between minor versions of JAX. Without this check, the first sign of a wrong
    version would be an AttributeError from the middle of a kernel.
    """
    least, end = SUPPORTED_JAX
    if not least <= jax.__version_info__ < end:
        supported = ",".join(
            f"{sign}{'.'.join(map(str, version))}" for sign, version in ((">=", least), ("<", end))
        )
        raise ImportError(
            f"pallas_kernels {__version__} needs jax{supported}, and jax {jax.__version__} is "
            f"installed; run: pip install 'jax{supported}' (for NVIDIA GPUs "
            f"'jax[cuda13]{supported}')"
        )


__version__ = package_version()
check_jax_version()
