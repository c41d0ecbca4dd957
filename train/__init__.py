"""Training of a Llama.

A module imports only modules of earlier lines of this list, or of its own folder
(`tests/train/test_rooms.py` checks it):

- `errors`, `ranges`, `formats`, `flag_errors`, `xla_flags`: small parts that the others use.
- `objective_config`, `hf_folder`: the settings of the objectives, and Hugging Face folders.
- `config`: the configuration of a run and its presets.
- `data`: batches. `guard`, `optimizers`: parts of the step.
- `objectives`, `teacher`: the losses of all objectives, and the model to learn from.
  `token_ids`: the tokens that begin and end a text.
- `step`: the training step, a pure function.
- `distributed`: several processes.
- `reporting`, `evaluate`: metrics, reports and the held-out loss.
- `checkpoints`: saved states. `planner`: policies that fit the memory. `faults`: the end of a run
  before its last step.
- `setup`, `outputs`: the start of a run, and the files that it writes.
- `reference`: log-probabilities for `dpo`.
- `loop`: the training loop.
- `cli`: the command line. `grpo`: an example of its own.
"""
