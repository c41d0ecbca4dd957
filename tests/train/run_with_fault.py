"""`python run_with_fault.py FAULT STEP PATH FLAGS`: `python -m train`, to which something happens.

The fault, one of FAULTS, comes when the batch of that step is made, up to three steps before the
step is taken, and when there is a checkpoint at the path.
"""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

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
    fault, at_step, before = FAULTS[sys.argv[1]], int(sys.argv[2]), Path(sys.argv[3])
    make_batch = PackedDataset.batch

    def batch(self, step, **options):
        # Of two processes that share the rows each makes its own half.
        assert len(options["rows"]) == options["batch_size"] // 2
        if step + 1 == at_step:
            while not before.exists():
                time.sleep(0.01)
            fault()
        return make_batch(self, step, **options)

    PackedDataset.batch = batch
    # Plots take seconds to draw.
    report.loss_png = report.details_png = lambda *args: b""
    del sys.argv[1:4]
    runpy.run_module("train", run_name="__main__", alter_sys=True)
