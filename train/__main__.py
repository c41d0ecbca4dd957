"""`python -m train`: trains a Llama. `python -m train --help` lists the flags.

`python -m train plan` says what fits on a device; see `train.plan_command`.
`python -m train replay` runs a step again that a run ended with; see `train.replay`.
`python -m train export`, `eval` and `sample` use a trained model; see `train.commands`.
`python -m train compare` writes a page about two runs; see `train.compare`.
"""

import errno
import os
import sys

if __name__ == "__main__":
    if sys.argv[1:2] == ["plan"]:
        # Read when JAX is imported. XLA logs as an error that a program is larger than the device;
        # to the planner that is an answer.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        from train import plan_command

        plan_command.run(sys.argv[2:])
    elif sys.argv[1:2] == ["replay"]:
        from train import replay

        replay.run(sys.argv[2:])
    elif sys.argv[1:2] == ["compare"]:
        from train import compare

        compare.run(sys.argv[2:])
    elif sys.argv[1:2] in (["export"], ["eval"], ["sample"]):
        from train import commands

        commands.COMMANDS[sys.argv[1]](sys.argv[2:])
    else:
        from train import distributed
        from train.config import parse_command_line
        from train.data import DataError
        from train.faults import RunError, hide_given_up_transfers
        from train.hf_folder import FolderError
        from train.loop import run

        hide_given_up_transfers()
        arguments = sys.argv[1:]
        try:
            # Before the other flags, whose defaults depend on the devices.
            with distributed.started(distributed.flags(arguments)):
                try:
                    run(parse_command_line(arguments))
                except (DataError, FolderError) as error:
                    print(f"error: {error}", file=sys.stderr)
                    sys.exit(2)  # as for a mistake on the command line
                except RunError as error:
                    sys.exit(f"error: {error}")
                except OSError as error:
                    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                        raise
                    # Of metrics, the report or the model on a full disk.
                    sys.exit(f"error: {error}")
        except RunError as error:
            sys.exit(f"error: {error}")
