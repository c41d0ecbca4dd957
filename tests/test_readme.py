"""The README's Python runs, in the order in which it is read."""

import re
from pathlib import Path

import jax

README = Path(__file__).parent.parent / "README.md"


def test_python_blocks_run_and_their_assertions_hold():
    blocks = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    namespace = {"__name__": "readme"}
    # As a user has it; the other tests refuse to promote dtypes.
    with jax.numpy_dtype_promotion("standard"):
        for block in blocks:
            exec(compile(block, str(README), "exec"), namespace)


def test_commands_name_what_exists():
    text = README.read_text()
    root = README.parent
    makefile = (root / "Makefile").read_text()
    for target in set(re.findall(r"^make (\w+)", text, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target
    for link in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (root / link).exists(), link
