"""Training of a Llama.

From the bottom to the top; a module imports only modules below it, or of its own folder:

- `errors`, `ranges`, `formats`, `flag_errors`, `xla_flags`: small parts that all others use.
- `config`: the configuration of a run and its presets.
- `data`: batches. `guard`, `optimizers`: parts of the step.
- `objective_config`, `hf_folder`, `teacher`, `objectives`: what a run learns, and the folders that
  it reads.
- `step`: the training step, a pure function.
- `distributed`: several processes.
- `reporting`, `evaluate`: metrics, reports and the held-out loss.
- `checkpoints`, `planner`, `faults`: saved states, policies that fit, ends before the last step.
- `setup`, `outputs`: what a run starts from and the files it writes.
- `reference`: log-probabilities for `dpo`. `grpo`: an example of its own.
- `loop`: the list of what a run does.
- `cli`: the command line.
"""
