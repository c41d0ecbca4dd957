"""The command line of `python -m train`.

- `command_line`: the flags of training, and helpers that the commands share.
- `commands`: `export`, `eval` and `sample`.
- `plan`, `compare`, `replay`: the command of the same name.
"""
