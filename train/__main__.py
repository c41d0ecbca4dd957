"""`python -m train`: trains a Llama, or runs a command; `python -m train --help` lists them.

A mistake in a flag, a bad file or a full disk ends the program with one line and status 2. A run
that cannot go on, and a plan in which nothing fits, end it with one line and status 1. In a command
that reads a run, such as `eval`, a run that cannot be read has status 2. With `--debug` the
traceback comes first. Other exceptions are bugs of this program, and keep their traceback. A device
without enough memory is no bug: it ends the program with one line and status 1.
"""

import contextlib
import importlib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence


def main(arguments: Sequence[str]) -> None:
    """Runs a command line, without the name of the program."""
    if "plan" in arguments[:2]:
        # XLA logs an error if a program is larger than the device. The planner expects that, so
        # this hides the log. It must be set before JAX is imported.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    from train.cli.command_line import COMMANDS, DEBUG

    debug = DEBUG in arguments
    arguments = [_with_hyphens(argument) for argument in arguments if argument != DEBUG]
    if arguments and arguments[0] in COMMANDS:
        _, module, function = COMMANDS[arguments[0]]
        with errors(f"python -m train {arguments[0]}: ", debug=debug):
            getattr(importlib.import_module(module), function)(arguments[1:])
    else:
        _train(arguments, debug=debug)


def _with_hyphens(argument: str) -> str:
    """The argument; the name of a flag may have underscores, as the fields do."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if name.startswith("--") else argument


def _train(arguments: list[str], *, debug: bool) -> None:
    from train import distributed, loop, setup
    from train.cli.command_line import COMMANDS, parse_command_line
    from train.errors import naming
    from train.faults import hide_given_up_transfers
    from train.flag_errors import FlagError
    from train.token_ids import with_ids_of_text

    hide_given_up_transfers()
    with errors(debug=debug):
        if arguments and not arguments[0].startswith("-"):
            raise FlagError(
                f"there is no command {arguments[0]!r}; there are {', '.join(COMMANDS)}"
            )
        # First, because the defaults of other flags depend on the devices.
        with distributed.started(distributed.flags(arguments)):
            # Again, because `started` ends one of several processes on any exception, and prints
            # the traceback unless it is a SystemExit.
            with errors(debug=debug):
                config = with_ids_of_text(parse_command_line(arguments), arguments)
                try:
                    setup.mesh_of(config)
                except FlagError:  # which names its flag
                    raise
                except ValueError as error:
                    raise FlagError(f"--mesh: {error}") from error
                with naming(config.runs_dir / config.name):
                    loop.run(config)


def _end_if_nobody_reads(error: BrokenPipeError) -> None:
    """Ends the program if its output is a pipe whose reader has ended, such as that to `head`."""
    try:
        print(flush=True)
    except BrokenPipeError:
        # Python flushes again at its end, and would print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(128 + signal.SIGPIPE) from error  # the status that shells give it


@contextlib.contextmanager
def errors(prefix: str = "", *, debug: bool = False) -> Iterator[None]:
    """Turns exceptions that users and machines cause into one line, and ends the program.

    Beside exceptions of this program that is XLA's error of a device that is out of memory.

    Args:
      prefix: Beginning of the line.
      debug: Print the traceback, too.
    """
    import jax

    from train.cli.command_line import DEBUG
    from train.data import DataError
    from train.errors import DiskError, FolderError, RunError, is_out_of_memory, one_line, text_of
    from train.flag_errors import FlagError
    from train.planner.plan import PlanError

    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError as e:
        _end_if_nobody_reads(e)
        raise
    except jax.errors.JaxRuntimeError as e:
        if not is_out_of_memory(e):
            raise
        if debug:
            traceback.print_exc()
        smaller = "--data.batch-size, with more --data.accumulation-steps"
        if prefix:  # a command
            smaller = "--batch-size, or --fsdp"
        sys.exit(
            f"{prefix}error: a device has too little memory ({one_line(e)}); take a smaller "
            f"{smaller}; docs/troubleshooting.md has more remedies"
        )
    except (ValueError, OSError, NotImplementedError, FloatingPointError, RunError, PlanError) as e:
        if debug:
            traceback.print_exc()
        message = text_of(e) or type(e).__name__
        if isinstance(e, DataError) and prefix:  # the message names the flags of training
            message = message.replace("--data.", "--")
        line = f"{prefix}error: {message}"
        # The messages of these classes are for users. Another exception may be a bug, which needs
        # the traceback.
        for_users = FlagError, DataError, FolderError, RunError, PlanError
        if not debug and not isinstance(e, for_users):
            line += f" ({DEBUG} shows the traceback)"
        if isinstance(e, RunError) and not isinstance(e, DiskError) and not prefix:
            sys.exit(line)  # status 1; `distributed` shows the line in the other processes, too
        print(line, file=sys.stderr)
        raise SystemExit(1 if isinstance(e, PlanError) else 2) from e


if __name__ == "__main__":
    main(sys.argv[1:])
