"""`python -m train plan`: the fastest batch and policy that fit on a device.

The device need not be in this machine.
"""

import argparse
import dataclasses
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence

import jax

from models.config import AUTO_REMAT, LlamaConfig
from models.sharding import make_mesh
from train.cli.command_line import Parser, number, parse_command_line
from train.config import PRESET_NAMES, MeshConfig, TrainConfig
from train.flag_errors import FlagError, flags_in
from train.planner import aot
from train.planner.cache import VARIABLE, cached
from train.planner.plan import (
    HOPELESS,
    Measures,
    Plan,
    Programs,
    plan,
    table,
    with_policies,
    with_remat,
)
from train.planner.target import (
    DEFAULT_FRACTION,
    Target,
    memory_fraction,
    target_elsewhere,
    target_here,
)
from train.ranges import POSITIVE, SIZE
from train.setup import check_batch_size
from train.teacher import check_teacher

# The largest batch that is tried. Larger ones are hardly faster: a 1B model computes for seconds on
# 64 rows of 4096 tokens.
_MOST_ROWS = 64


def run(arguments: Sequence[str]) -> None:
    """Prints the table and the command line that trains as planned.

    Raises:
      FlagError: A flag is wrong, or the compilers are missing.
      FolderError: The teacher does not fit the model, its rows or the mesh, or cannot be read.
      ValueError: There is no such GPU, or the flags contradict each other or the devices.
      PlanError: No configuration fits.
    """
    flags, rest = _parser().parse_known_args(arguments)
    if flags.no_cache:
        os.environ[VARIABLE] = ""
    try:
        config, targets = _config_and_targets(flags, rest)
        measures = _OnMeshes(targets)
        is_fixed = flags.batch_size is not None or "--data.batch-size" in flags_in(rest)
        configs = list(_configs(config, targets, measures, fixed_batch=is_fixed))
        chosen = plan(configs, targets[config.mesh], measures)
    except RuntimeError as error:  # compilers are missing, or cannot compile the step
        raise FlagError(str(error)) from error
    print(table(chosen))
    print(f"\n{_command(flags, rest, chosen)}")
    if flags.device and chosen.target.mesh.size > 1:
        print(
            "assumed: the exchange over data and fsdp hides behind the computation; the exchange "
            "over tensor adds its time"
        )


class _OnMeshes:
    """`Measures` that ask the programs of each configuration's mesh."""

    def __init__(self, targets: Mapping[MeshConfig, Target]):
        self._measures: dict[MeshConfig, Measures] = {
            mesh: cached(Programs(target), target) for mesh, target in targets.items()
        }

    def estimate(self, config: TrainConfig) -> tuple[float, int]:
        return self._measures[config.mesh].estimate(config)

    def memory(self, config: TrainConfig) -> int:
        return self._measures[config.mesh].memory(config)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "plan",
        "Finds the batch and the rematerialization policy that fit on a device and are fastest, "
        "by compiling the training step for the device ahead of time.",
        epilog="This command takes all flags of `python -m train`, too (`python -m train --help`), "
        "for example --model.no-scan-layers, --model.param-dtype bfloat16, "
        "--data.accumulation-steps 4, --mesh.fsdp 4 (number of devices that share parameters and "
        "moments; the default here is all devices that the other axes leave) and --model.remat "
        "NAME (plans this policy alone). XLA takes 75 % of a GPU's memory, or the share in "
        f"XLA_CLIENT_MEM_FRACTION. Results are kept in a cache; {VARIABLE} names its folder, and "
        "turns the cache off if it is empty.",
    )
    add = parser.add_argument
    add("--preset", default="demo", help=f"one of {', '.join(PRESET_NAMES)} (default demo)")
    add(
        "--device",
        help=f"GPU to plan for: {', '.join(aot.CHIPS)}, or JAX's name for it. It need not be in "
        "this machine. Default: the GPU of this machine",
    )
    add(
        "--num-devices",
        type=number(int, SIZE),
        help="number of GPUs (default 1; without --device all GPUs of this machine)",
    )
    add(
        "--tensor",
        type=number(int, SIZE),
        nargs="+",
        help="number of devices that share each sequence, as in --mesh.tensor; several numbers are "
        "compared",
    )
    add(
        "--sequence-length",
        type=number(int, SIZE),
        help="number of tokens in a row (default: as in the preset)",
    )
    add(
        "--batch-size",
        type=number(int, SIZE),
        help="number of rows in a forward and backward over all devices (default: compares powers "
        "of two)",
    )
    add(
        "--memory-gib",
        type=number(float, POSITIVE),
        help="memory of a device in GiB, in place of the memory it has",
    )
    add("--no-cache", action="store_true", help="ignore the cache")
    return parser


def _config_and_targets(
    flags: argparse.Namespace, rest: list[str]
) -> tuple[TrainConfig, dict[MeshConfig, Target]]:
    """The configuration, and a target for each mesh to plan for.

    The configuration has the first of the meshes, and the policy "auto" unless the flags name one.
    """
    given = flags_in(rest)
    chip = aot.chip(flags.device) if flags.device else None
    if chip:
        jax.config.update("jax_platforms", "cpu")  # aot.devices stand for the GPUs
        devices = aot.devices(chip, flags.num_devices or 1)
        with jax.default_device(devices[0]):  # the defaults of a preset depend on the device
            config = parse_command_line(_train_arguments(flags, rest))
            _check_heads(config.model, chip)
    else:
        if jax.default_backend() != "gpu":
            raise FlagError("this machine has no GPU; name one, for example --device h100")
        config = parse_command_line(_train_arguments(flags, rest))
        devices = jax.devices()[: flags.num_devices]
        if flags.num_devices and len(devices) < flags.num_devices:
            raise ValueError(
                f"this machine has only {len(devices)} of {flags.num_devices} devices; name the "
                "GPU with --device"
            )
    if "--model.remat" not in given:
        config = with_remat(config, AUTO_REMAT)
    memory_bytes = int(flags.memory_gib * 2**30) if flags.memory_gib else None
    if flags.tensor and "--mesh.tensor" in given:
        raise ValueError("--tensor and --mesh.tensor mean the same; leave out one")
    targets = {}
    for tensor in flags.tensor or [config.mesh.tensor]:
        sizes = dataclasses.replace(config.mesh, tensor=tensor)
        sizes = _all_sizes(sizes, len(devices), fixed_fsdp="--mesh.fsdp" in given)
        mesh = make_mesh(**dataclasses.asdict(sizes), devices=devices)
        check_teacher(dataclasses.replace(config, mesh=sizes))
        targets[sizes] = (
            target_elsewhere(chip, mesh, memory_bytes) if chip else target_here(mesh, memory_bytes)
        )
    return dataclasses.replace(config, mesh=next(iter(targets))), targets


def _check_heads(model: LlamaConfig, chip: aot.Chip) -> None:
    """Refuses heads that JAX gives to cuDNN only where it finds a Hopper GPU in the machine.

    On such a chip `models.attention` takes cuDNN for heads of up to 256 channels.
    """
    takes_cudnn = (
        model.attention_implementation in (None, "cudnn")
        and model.dtype != "float32"
        and chip.compute_capability[0] == 9
    )
    if takes_cudnn and 128 < model.head_dim <= 256 and model.head_dim % 8 == 0:
        raise FlagError(
            f"--model.head-dim {model.head_dim}: JAX traces cuDNN's attention with more than 128 "
            "channels only on a machine with a Hopper GPU; plan there without --device, or set "
            "--model.attention-implementation xla, which needs more memory"
        )


def _all_sizes(mesh: MeshConfig, num_devices: int, *, fixed_fsdp: bool) -> MeshConfig:
    """The mesh of `num_devices`; unless `fsdp` is fixed, it takes the devices that are left."""
    data, fsdp, tensor = mesh.data, mesh.fsdp, mesh.tensor
    if not fixed_fsdp:
        fsdp = max(1, num_devices // (max(1, data) * tensor))
    if data == -1:
        data = max(1, num_devices // (fsdp * tensor))
    return MeshConfig(data=data, fsdp=fsdp, tensor=tensor)


def _train_arguments(flags: argparse.Namespace, rest: list[str]) -> list[str]:
    """The command line of training with the settings that the flags of `plan` give."""
    arguments = ["--preset", flags.preset, *rest]
    if flags.sequence_length is not None:
        arguments += ["--data.sequence-length", str(flags.sequence_length)]
    if flags.batch_size is not None:
        arguments += ["--data.batch-size", str(flags.batch_size)]
    return arguments


def _configs(
    config: TrainConfig,
    targets: Mapping[MeshConfig, Target],
    measures: Measures,
    *,
    fixed_batch: bool,
) -> Iterator[TrainConfig]:
    """Each policy on each mesh, with the fixed batch, or with powers of two until none can fit."""
    for mesh, target in targets.items():
        on_mesh = dataclasses.replace(config, mesh=mesh)
        num_parts = mesh.data * mesh.fsdp
        if fixed_batch:
            check_batch_size(config, num_parts)
            yield from with_policies(on_mesh)
            continue
        for with_policy in with_policies(on_mesh):
            rows = config.rows_of_example
            while rows <= _MOST_ROWS * mesh.tensor:
                data = dataclasses.replace(config.data, batch_size=rows * num_parts)
                candidate = dataclasses.replace(with_policy, data=data)
                yield candidate
                if measures.estimate(candidate)[1] > HOPELESS * target.limit_bytes:
                    break
                rows *= 2


def _command(flags: argparse.Namespace, rest: list[str], chosen: Plan) -> str:
    """The command line that trains as planned."""
    config, given = chosen.best.config, flags_in(rest)
    arguments = ["--preset", flags.preset, *rest]
    if "--model.remat" not in given:
        arguments += ["--model.remat", config.model.remat]
    if "--data.batch-size" not in given:
        arguments += ["--data.batch-size", str(config.data.batch_size)]
    if flags.sequence_length is not None:
        arguments += ["--data.sequence-length", str(config.data.sequence_length)]
    if config.mesh.fsdp > 1 and "--mesh.fsdp" not in given:
        arguments += ["--mesh.fsdp", str(config.mesh.fsdp)]
    if config.mesh.tensor > 1 and "--mesh.tensor" not in given:
        arguments += ["--mesh.tensor", str(config.mesh.tensor)]
    command = f"python -m train {shlex.join(arguments)}"
    if memory_fraction() != DEFAULT_FRACTION:
        command = f"XLA_CLIENT_MEM_FRACTION={memory_fraction():g} {command}"
    return command
