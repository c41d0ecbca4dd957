"""Code that all Mosaic GPU kernels share.

- `device`: the GPU that kernels are compiled for, and its limits.
- `kernel`: the launch of a kernel, and the error where it cannot run.
- `arrays`: alignment of operands and results in device memory.
- `layouts`: a register layout of rows, and loads and stores in it.
- `wgmma`: tiles of numbers in the registers of a warpgroup.
- `math`: functions of float32 values in few instructions.
- `hopper_gemm`: the main loop of matrix products on Hopper.

Mosaic GPU is the Pallas backend for NVIDIA GPUs
(https://docs.jax.dev/en/latest/pallas/gpu/index.html). A thread block has one or more warpgroups of
four warps; a Pallas thread is a warpgroup.
"""
