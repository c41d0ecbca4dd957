"""Checks the files in a wheel and an sdist: `python tests/support/distribution.py FOLDER`."""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def sources() -> set[str]:
    """The files of the package, relative to the checkout."""
    package = ROOT / "pallas_kernels"
    files = {*package.rglob("*.py"), package / "py.typed"}
    return {str(path.relative_to(ROOT)) for path in files}


def check_wheel(names: set[str]) -> None:
    """Exits with a message unless the wheel has the package, its licence and metadata alone."""
    metadata = {name for name in names if re.match(r"pallas_kernels-[^/]+\.dist-info/", name)}
    if names - metadata != sources():
        sys.exit(f"the wheel and the checkout differ in {sorted(names - metadata ^ sources())}")
    if not any(name.endswith("/licenses/LICENSE") for name in metadata):
        sys.exit("the wheel has no LICENSE")


def check_sdist(names: set[str]) -> None:
    """Exits with a message unless the sdist has the package and all that its build reads."""
    needed = sources() | {"pyproject.toml", "README.md", "LICENSE"}
    if missing := needed - {name.partition("/")[2] for name in names}:
        sys.exit(f"the sdist lacks {sorted(missing)}")


def main() -> None:
    """Checks the only wheel and the only sdist in the folder."""
    folder = Path(sys.argv[1])
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        check_wheel(set(archive.namelist()))
    with tarfile.open(sdist) as archive:
        check_sdist(set(archive.getnames()))
    print(f"{wheel.name} and {sdist.name} have the right files")


if __name__ == "__main__":
    main()
