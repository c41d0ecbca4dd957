"""A part of `train` may import only its own room and the rooms below it."""

import ast
from pathlib import Path

import pytest

import train

FOLDER = Path(train.__file__).parent
# The floors from the bottom to the top. Rooms of one floor do not import each other.
FLOORS = (
    ("errors", "ranges", "formats", "flag_errors", "xla_flags"),
    ("objective_config", "hf_folder"),
    ("config",),
    ("data", "guard", "optimizers"),
    ("objectives", "teacher", "token_ids"),
    ("step",),
    ("distributed",),
    ("reporting", "evaluate"),
    ("checkpoints", "planner", "faults"),
    ("setup", "outputs"),
    ("reference",),
    ("loop",),
    ("cli", "grpo"),
    ("__main__",),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
MODULES = sorted(path for path in FOLDER.rglob("*.py") if path != FOLDER / "__init__.py")


def room_of(path):
    return path.relative_to(FOLDER).parts[0].removesuffix(".py")


def rooms_imported(source):
    """The rooms of `train` in all imports, including imports inside of functions."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module="train", names=names):
                yield from (name.name for name in names)
            case ast.ImportFrom(module=str(module)) if module.startswith("train."):
                yield module.split(".")[1]
            case ast.Import(names=names):
                parts = (name.name.split(".") for name in names)
                yield from (names[1] for names in parts if names[0] == "train" and names[1:])


def test_imports_of_every_kind_are_found():
    source = """
import train.a, os
from train import b, c
from train.d.e import f
def g():
    from train.h import i
"""
    assert list(rooms_imported(source)) == ["a", "b", "c", "d", "h"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(FOLDER)))
def test_no_module_imports_a_room_above_its_own(path):
    room = room_of(path)
    for other in rooms_imported(path.read_text()):
        assert other == room or FLOOR[other] < FLOOR[room], f"{room} imports {other}"
