"""`python run_with_fault.py FAULT STEP PATH RUNS FLAGS`: `python -m train` with a fault.

The fault is one of FAULTS and happens once. It waits until the batch of the step is made, up to
three steps before the step is taken, and until there is a checkpoint at the path. The program calls
the training loop RUNS times and compiles its steps once.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

from train import loop
from train.data import PackedDataset
from train.reporting import report


def fail():
    raise ValueError("the disk is gone")


FAULTS = {
    "none": lambda: None,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "raise": fail,
    "hang": lambda: time.sleep(1000),
}

if __name__ == "__main__":
    at_step, before, runs = int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    faults = [FAULTS[sys.argv[1]]]
    make_batch = PackedDataset.batch
    train_once, compile_steps = loop.run, loop.compile_steps
    programs = []

    def train(config):
        return [train_once(config) for _ in range(runs)][-1]

    def compile_once(*args):
        if not programs:
            programs.append(compile_steps(*args))
        return programs[0]

    def batch(self, step, **options):
        # Two processes share the rows, and each makes its own half.
        assert len(options["rows"]) == options["batch_size"] // 2
        if step + 1 == at_step and faults:
            while not before.exists():
                time.sleep(0.01)
            faults.pop()()
        return make_batch(self, step, **options)

    PackedDataset.batch = batch
    loop.run, loop.compile_steps = train, compile_once
    # Plots take seconds to draw.
    report.loss_png = report.details_png = lambda *args: b""
    del sys.argv[1:5]
    runpy.run_module("train", run_name="__main__", alter_sys=True)
