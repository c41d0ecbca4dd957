"""`python -m train`: trains a Llama. `python -m train --help` lists the flags.

`python -m train plan` says what fits on a device; see `train.plan_command`.
"""

import os
import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["plan"]:
        # Read when JAX is imported. XLA logs as an error that a program is larger than the device;
        # to the planner that is an answer.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        from train import plan_command

        plan_command.run(sys.argv[2:])
    else:
        from train.config import parse_command_line
        from train.loop import run

        run(parse_command_line(sys.argv[1:]))
