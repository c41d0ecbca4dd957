"""The flags of training, made from `TrainConfig`, and helpers for the flags of the commands.

A mistake in a flag becomes one line that names the flag.
"""

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import tyro

from train.config import PRESET_NAMES, TrainConfig, preset
from train.data import check_effects
from train.errors import FolderError
from train.flag_errors import FlagError, flags_in, tyro_errors
from train.hf_folder import has_tokenizer, read_model_config
from train.ranges import Range

# Line of help, module and function of each command. A command imports its module when it runs.
COMMANDS = {
    "plan": ("what fits on a device, here or not", "train.cli.plan", "run"),
    "export": ("write a model as a Hugging Face folder", "train.cli.commands", "export"),
    "eval": ("measure how well a model predicts text", "train.cli.commands", "evaluate"),
    "sample": ("generate text", "train.cli.commands", "sample"),
    "compare": ("write a page about two runs", "train.cli.compare", "run"),
    "replay": ("repeat the step that ended a run", "train.cli.replay", "run"),
}
DEBUG = "--debug"
DEBUG_HELP = "show the traceback of an error"


def parse_command_line(arguments: Sequence[str]) -> TrainConfig:
    """Reads `--preset NAME` and a flag for every field of its `TrainConfig`.

    With `--init-from FOLDER` the model and the tokenizer in the folder are the defaults.

    Raises:
      FlagError: A flag is unknown or has a wrong value.
      FolderError: A run cannot start from the folder.
    """
    prog = "python -m train"
    parser = argparse.ArgumentParser(
        prog, add_help=False, allow_abbrev=False, exit_on_error=False, argument_default=None
    )
    parser.add_argument("--preset", default="demo")
    parser.add_argument("--init-from", type=Path)
    _check_not_empty(arguments)
    try:
        chosen, rest = parser.parse_known_args(arguments)
        default = preset(chosen.preset)
    except argparse.ArgumentError as error:
        raise FlagError(f"{error.argument_name}: {error.message}") from error
    except ValueError as error:
        raise FlagError(f"--preset: {error}") from error
    if chosen.init_from:
        model = read_model_config(chosen.init_from, default.model)
        positions = model.max_position_embeddings
        if default.data.sequence_length > positions:
            print(
                f"{chosen.init_from} has {positions} positions, so --data.sequence-length is "
                f"{positions} by default, not {default.data.sequence_length}"
            )
        default = dataclasses.replace(
            default,
            init_from=chosen.init_from,
            model=model,
            data=dataclasses.replace(
                default.data, sequence_length=min(default.data.sequence_length, positions)
            ),
            sample_tokens=min(default.sample_tokens, positions // 2),
        )
    try:
        with tyro_errors(TrainConfig.__name__):
            config = tyro.cli(
                TrainConfig,
                prog=prog,
                description=_description(chosen.preset),
                default=default,
                args=rest,
            )
    except NotImplementedError as error:  # which tyro does not expect
        raise FlagError(str(error)) from error
    _check_effects(config, flags_in(rest))
    return _with_tokenizer(config)


def _check_effects(config: TrainConfig, given: set[str]) -> None:
    """Refuses flags that were given, even with their default, and that other flags make useless."""
    if config.data.path:
        check_effects(config.data, given)
    if "--data.source" in given and config.data.path:
        raise FlagError(
            f"--data.source {config.data.source} has no effect with --data.path, which names the "
            "text; leave one of them out"
        )
    if "--data.weights" in given and len(config.data.path) == 1:
        raise FlagError(
            f"--data.weights {config.data.weights[0]} has no effect, because --data.path names one "
            "path, which has all rows; leave it out, or name more paths"
        )
    if "--checkpoint.keep" in given and not config.checkpoint.every:
        raise FlagError(
            f"--checkpoint.keep {config.checkpoint.keep} has no effect without --checkpoint.every, "
            "because the run makes no checkpoints; set it, or leave --checkpoint.keep out"
        )
    if "--eval-batches" in given and not config.eval_every:
        raise FlagError(
            f"--eval-batches {config.eval_batches} has no effect with --eval-every 0, because the "
            "run has no evaluations; set --eval-every, or leave --eval-batches out"
        )
    if config.data.held_out_path and not config.eval_every:
        raise FlagError(
            f"--data.held-out-path {' '.join(map(str, config.data.held_out_path))} has no effect "
            "with --eval-every 0, because the run has no evaluations; set --eval-every, or leave "
            "--data.held-out-path out"
        )
    if "--sample-prompt" in given and not config.sample_tokens:
        raise FlagError(
            f"--sample-prompt {config.sample_prompt!r} has no effect with --sample-tokens 0, "
            "because the run writes no samples; set --sample-tokens, or leave --sample-prompt out"
        )


def _description(preset_name: str) -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            f"Trains a Llama. --preset {{{','.join(PRESET_NAMES)}}} (default demo) sets the "
            f"defaults of all other flags; below are the defaults of {preset_name}. {DEBUG}: "
            f"{DEBUG_HELP}.",
            "",
            "Commands, each with its own --help:",
            *(f"  {name:{width}}  {text}" for name, (text, *_) in COMMANDS.items()),
        ]
    )


# Flags for which an empty text has a meaning.
_MAY_BE_EMPTY = ("--data.bos-token", "--sample-prompt")


def _check_not_empty(arguments: Sequence[str]) -> None:
    """Refuses flags with an empty value. An empty path, for example, is the current folder."""
    flag = ""
    for argument in arguments:
        name, is_assigned, value = argument.partition("=")
        flag = name if name.startswith("--") else flag
        is_empty = not argument or (name.startswith("--") and is_assigned and not value)
        if is_empty and flag not in _MAY_BE_EMPTY:
            raise FlagError(f"{flag}: the value is empty; give a value or leave out the flag")


def _with_tokenizer(config: TrainConfig) -> TrainConfig:
    """The configuration with the tokenizer of `init_from`, unless it names another."""
    folder, data = config.init_from, config.data
    if folder is None or data.tokenizer:
        return config
    if not has_tokenizer(folder):
        print(f"{folder} has no tokenizer.json: a token is a byte; --data.tokenizer names one")
        return config
    if data.path:
        return dataclasses.replace(config, data=dataclasses.replace(data, tokenizer=folder))
    if data.source == "stdlib":
        raise FolderError(
            f"the model in {folder} has a tokenizer, but the standard library is read as bytes; "
            "name other text with --data.path"
        )
    return config


class Parser(argparse.ArgumentParser):
    """A parser of a command's flags; a mistake ends the program with one line and status 2."""

    def __init__(self, command: str, description: str, **options: Any):
        prog = f"python -m train {command}"
        super().__init__(prog=prog, allow_abbrev=False, description=description, **options)
        # Only for `--help`, because `train.__main__` takes the flag out.
        self.add_argument(DEBUG, action="store_true", help=DEBUG_HELP)

    def error(self, message: str) -> NoReturn:
        """Prints the message in one line and ends the program."""
        self.exit(2, f"{self.prog}: error: {' '.join(message.split())}\n")


def number(kind: type[int] | type[float], allowed: Range) -> Callable[[str], int | float]:
    """A type for argparse: numbers in a range."""

    def parse(text: str) -> int | float:
        try:
            value = kind(text)
        except ValueError as error:
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from error
        if fault := allowed.fault(value):
            raise argparse.ArgumentTypeError(f"{text} {fault}")
        return value

    return parse


def not_empty(text: str) -> str:
    """A type for argparse: text that is not empty."""
    if not text:
        raise argparse.ArgumentTypeError("the value is empty")
    return text


def file_or_folder(text: str) -> Path:
    """A type for argparse: a path. An empty text is refused; it would be the current folder."""
    return Path(not_empty(text))
