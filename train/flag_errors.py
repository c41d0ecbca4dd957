"""The flags of a command line; a mistake in one becomes one line that names the flag."""

import contextlib
import io
import re
import sys
from collections.abc import Iterable, Iterator


class FlagError(ValueError):
    """A mistake in a flag, in one line that needs no traceback."""


def flags_in(arguments: Iterable[str]) -> set[str]:
    """The names of the flags of a command line, such as "--steps" for "--steps=3"."""
    return {argument.partition("=")[0] for argument in arguments if argument.startswith("--")}


@contextlib.contextmanager
def tyro_errors(root: str) -> Iterator[None]:
    """Turns tyro's box around a mistake into a FlagError.

    Args:
      root: Name of the class that the flags make; its own flags have no prefix.

    Raises:
      FlagError: tyro ended the program with status 2.
    """
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            yield
    except SystemExit as error:
        if error.code != 2:
            raise
        raise FlagError(_unboxed(box.getvalue(), root)) from error
    sys.stderr.write(box.getvalue())


def _unboxed(box: str, root: str) -> str:
    """The message in tyro's box, with a similar flag if the flag is unknown."""
    text = "\n".join(line.strip("│ ") for line in box.splitlines() if line[:1] not in "╭╰")
    sections = re.split(r"^[─-]{4,}$", text, flags=re.MULTILINE)
    if "│" not in box:  # a terminal without such characters has the title inside of the box
        del sections[0]
    message = " ".join(sections[0].split())
    if found := re.fullmatch(r"Error parsing (?:--)?([\w.-]+): (.*)", message):
        part, message = found.groups()
        field = re.match(r"([a-z][\w.]*)=", message)
        names = [name for name in (part, field and field[1]) if name and name != root]
        if names:
            flag = "--" + ".".join(names).replace("_", "-")
            message = f"{flag}: {message}"
    similar = re.search(r"^--\S+", "".join(sections[1:]), re.MULTILINE)
    if similar and "nrecognized" in message:
        return f"{message}; did you mean {similar[0]}?"
    return message
