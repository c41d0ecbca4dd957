"""`python -m train`: trains a Llama. `python -m train --help` lists the flags."""

import sys

from train.config import parse_command_line
from train.loop import run

if __name__ == "__main__":
    run(parse_command_line(sys.argv[1:]))
