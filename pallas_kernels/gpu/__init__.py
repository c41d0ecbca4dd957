"""What the Mosaic GPU kernels share.

Mosaic GPU is the Pallas backend for NVIDIA GPUs
(https://docs.jax.dev/en/latest/pallas/gpu/index.html). A thread block has one or more warpgroups of
four warps; a Pallas thread is a warpgroup.
"""
