"""Models on the disk.

- `checkpoint`: the checkpoints of a run, written and restored by `Checkpoints`.
- `files`: the files of checkpoints: their names, their lock, and kinds of errors.
- `saved`: the model of a run, a checkpoint or a Hugging Face folder, for the commands.
"""
