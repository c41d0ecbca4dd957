"""The matrix of transformations as docs/transforms.md shows it."""

import textwrap

from support.transforms import MATRIX, OPERATIONS, RAISES, WORKS


def table() -> str:
    """The transformations for which an implementation raises, as docs/transforms.md shows them.

    Operations with the same outcomes share a column.
    """
    columns: dict[tuple[str, ...], list[str]] = {}
    for operation in OPERATIONS:
        outcomes = tuple(_cell(MATRIX[name][operation]) for name in MATRIX)
        columns.setdefault(outcomes, []).append(f"`{operation}`")
    rows = [row for row in zip(MATRIX, *columns, strict=True) if set(row[1:]) != {WORKS}]
    heads = ["transformation", *(", ".join(operations) for operations in columns.values())]
    table_rows = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in table_rows)


def working() -> str:
    """The other transformations, as a sentence of docs/transforms.md."""
    names = [name for name in MATRIX if {*map(_cell, MATRIX[name].values())} == {WORKS}]
    return textwrap.fill("; ".join(names) + ".", 100, break_on_hyphens=False)


def _cell(outcomes: dict[str, str]) -> str:
    raising = [f"`{name}`" for name, outcome in outcomes.items() if outcome == RAISES]
    if not raising:
        return WORKS
    *others, last = raising
    return f"{', '.join(others)} and {last} raise" if others else f"{last} raises"
