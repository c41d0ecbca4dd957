"""Training of a Llama.

The list begins with the lowest floor. A module imports only modules of earlier lines, or of its
own folder (`tests/train/test_rooms.py`):

- `errors`, `ranges`, `formats`, `flag_errors`, `xla_flags`: small parts that all others use.
- `objective_config`, `hf_folder`: the settings of the objectives, and Hugging Face folders.
- `config`: the configuration of a run and its presets.
- `data`: batches. `guard`, `optimizers`: parts of the step.
- `objectives`, `teacher`: the losses of `dpo` and `distill`, and the model to learn from.
- `step`: the training step, a pure function.
- `distributed`: several processes.
- `reporting`, `evaluate`: metrics, reports and the held-out loss.
- `checkpoints`, `planner`, `faults`: saved states, policies that fit, ends before the last step.
- `setup`, `outputs`: what a run starts from and the files it writes.
- `reference`: log-probabilities for `dpo`.
- `loop`: the list of what a run does.
- `cli`: the command line. `grpo`: an example of its own.
"""
