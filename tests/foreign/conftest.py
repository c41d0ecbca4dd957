"""Leaves this folder to `make test-foreign`, which has an environment for each project."""

import os

import jax

if "FOREIGN_PROJECT" not in os.environ:
    collect_ignore_glob = ["test_*.py"]
else:
    # The models are not written for strict dtypes, and the tests need no mesh.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_num_cpu_devices", 1)
