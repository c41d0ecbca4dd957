"""`python -m train compare RUN RUN`: one page with the curves of two runs and what differs."""

from collections.abc import Sequence
from pathlib import Path

from train.cli.command_line import Parser, file_or_folder
from train.flag_errors import FlagError
from train.reporting.compare import write_comparison


def run(arguments: Sequence[str]) -> None:
    """Writes the page.

    Raises:
      FlagError: The folder of the page does not exist.
      FolderError: A folder is not a run.
      DiskError: A file cannot be read or written.
    """
    parser = Parser(
        "compare", "Writes a page with the curves of two runs and their differing settings."
    )
    parser.add_argument("runs", type=file_or_folder, nargs=2, metavar="RUN")
    parser.add_argument(
        "--output", type=file_or_folder, default=Path("compare.html"), help="default: compare.html"
    )
    flags = parser.parse_args(arguments)
    folder = flags.output.parent
    if not folder.is_dir():
        raise FlagError(
            f"--output {flags.output}: there is no folder {folder}; make it, or name another file"
        )
    first, second = flags.runs
    write_comparison(first, second, flags.output)
    print(flags.output.absolute())
