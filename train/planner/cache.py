"""The planner's measurements on disk: tracing and compiling a Llama takes seconds.

Each program has a JSON file in `$XDG_CACHE_HOME/pallas-kernels/plans`, or in `~/.cache` if that
variable is not set. `TRAIN_PLAN_CACHE` names another folder; if it is empty, there is no cache. The
name of a file is a hash of everything that decides the program and its estimates. This is the
configuration, the mesh, the device and its speeds, some variables of the environment, the versions
and this project's source. The limit of memory changes no program, so plans for another limit use
the same files. A file that cannot be read or written counts as missing.
"""

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import math
import os
import pathlib
from typing import Any

from train.config import TrainConfig
from train.planner.plan import Measures
from train.planner.target import Target
from train.reporting.metrics import jsonable
from train.teacher import teacher_model

VARIABLE = "TRAIN_PLAN_CACHE"
_ROOT = pathlib.Path(__file__).parents[2]
_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "flax", "optax")
# The fields of a configuration that change the time or the memory of the step. The limits of
# `train.guard` change the step as well, but only a few scalars of it.
_FIELDS = (
    *("objective", "dpo", "distill", "model", "data", "optimizer", "steps", "z_loss"),
    *("counted_fraction", "xla_options"),
)
_ENVIRONMENT = ("XLA_FLAGS", "PALLAS_KERNELS_TUNED", "NVIDIA_TF32_OVERRIDE")


def cache_folder() -> pathlib.Path | None:
    """The folder of the files; None if the cache is off."""
    if (named := os.environ.get(VARIABLE)) is not None:
        return pathlib.Path(named).expanduser() if named else None
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "pallas-kernels" / "plans"


def cached(measures: Measures, target: Target) -> Measures:
    """`measures` with a cache: it answers from the disk if it can."""
    folder = cache_folder()
    return measures if folder is None else _Cached(measures, target, folder)


class _Cached:
    def __init__(self, measures: Measures, target: Target, folder: pathlib.Path):
        self._measures, self._target, self._folder = measures, target, folder

    def estimate(self, config: TrainConfig) -> tuple[float, int]:
        found = self._read(config)
        if {"seconds", "estimated_bytes"} <= found.keys():
            return float(found["seconds"]), int(found["estimated_bytes"])
        seconds, estimated = self._measures.estimate(config)
        self._write(config, {"seconds": seconds, "estimated_bytes": estimated})
        return seconds, estimated

    def memory(self, config: TrainConfig) -> int:
        found = self._read(config)
        if "memory_bytes" in found:
            return int(found["memory_bytes"])
        memory = self._measures.memory(config)
        self._write(config, found | {"memory_bytes": memory})
        return memory

    def _path(self, config: TrainConfig) -> pathlib.Path:
        return self._folder / f"{_key(config, self._target)}.json"

    def _read(self, config: TrainConfig) -> dict[str, int | float]:
        """The entries of the file that are plausible: finite numbers above 0."""
        found = None
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self._path(config).read_text())
        if not isinstance(found, dict):
            return {}
        return {name: value for name, value in found.items() if _is_positive(value)}

    def _write(self, config: TrainConfig, found: dict[str, int | float]) -> None:
        path = self._path(config)
        # Another name first, because two runs may plan at the same time.
        part = path.with_suffix(f".{os.getpid()}.part")
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(found) + "\n")
            part.replace(path)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def _key(config: TrainConfig, target: Target) -> str:
    content = {
        "config": {name: getattr(config, name) for name in _FIELDS},
        "teacher": teacher_model(config),
        "mesh": dict(target.mesh.shape),
        "target": target.description,
        "rates": target.rates,
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
        "versions": _versions(),
        "source": _source_hash(),
    }
    text = json.dumps(jsonable(content), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@functools.cache
def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for package in _PACKAGES:
        found[package] = None
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


@functools.cache
def _source_hash() -> str:
    digest = hashlib.sha256()
    for package in ("models", "pallas_kernels", "train"):
        for path in sorted((_ROOT / package).rglob("*.py")):
            digest.update(f"{path.relative_to(_ROOT)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
