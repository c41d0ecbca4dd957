"""Writes tables in Markdown, and reads those in the files of results."""

from collections.abc import Iterable, Sequence


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table; a row with fewer cells than the header ends in empty ones."""
    line = lambda cells: "|" + "".join(f" {cell} |" if cell else " |" for cell in cells)
    body = [line([*row, *[""] * (len(header) - len(row))]) for row in rows]
    return [line(header), "|---" * len(header) + "|", *body]


def rows(text: str, columns: Sequence[str]) -> list[list[str]]:
    """The cells of the named columns, row by row, of a table in Markdown.

    Reads the first table whose first column is `columns[0]`.

    Raises:
      ValueError: No table begins with that column, or it lacks another one.
    """
    lines = text.splitlines()
    cells = lambda line: [cell.strip() for cell in line.strip("| ").split("|")]
    try:
        first = next(i for i, line in enumerate(lines) if line.startswith(f"| {columns[0]} |"))
        places = [cells(lines[first]).index(column) for column in columns]
    except (StopIteration, ValueError):
        names = f"{', '.join(columns[:-1])} and {columns[-1]}"
        raise ValueError(f"no table with {names}") from None
    found = []
    for line in lines[first + 2 :]:
        if not line.startswith("|"):
            break
        row = cells(line)
        found.append([row[place] for place in places])
    return found
