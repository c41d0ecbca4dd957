"""The output of a run: metrics, progress, reports, comparisons and traces.

- `metrics`, `rows`: `metrics.jsonl`, speed and FLOPs. `progress`: the terminal.
- `results`, `figures`, `page`, `report`, `compare`: the pages of a run and of two runs.
- `tracking`: TensorBoard and Weights & Biases. `profiling`: traces and the compiled step.
"""
