"""The README and the pages of `docs/`, and the code in them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

# Their code ran on the day of an entry, and need not run today.
_RECORDS = ("docs/lab/", "docs/decisions/")
_GENERATED = ("docs/api/", "docs/_build/")

_BLOCK = re.compile(r"^```(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def name(page: Path) -> str:
    """The page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def pages() -> list[Path]:
    """The pages whose code must run."""
    found = [README, *sorted((ROOT / "docs").rglob("*.md"))]
    return [page for page in found if not name(page).startswith(_RECORDS + _GENERATED)]


def python_blocks(page: Path) -> list[str]:
    """The blocks that are marked as Python, each after empty lines that keep its line numbers."""
    text = page.read_text()
    return [
        "\n" * text.count("\n", 0, block.start(2)) + block[2]
        for block in _BLOCK.finditer(text)
        if block[1] == "python"
    ]


def command_lines(page: Path) -> list[str]:
    """The lines of all other blocks of code, with continued ones joined and comments left out."""
    blocks = [code for language, code in _BLOCK.findall(page.read_text()) if language != "python"]
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [re.sub(r"(^| +)# .*", "", line) for line in lines]
