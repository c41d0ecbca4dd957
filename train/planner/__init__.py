"""The time and the memory of a step, and the settings that fit.

- `plan`: chooses a policy, a batch and a mesh.
- `cost`, `dataflow`, `attention`, `splits`: time and memory of a step, estimated from its trace.
- `aot`: GPUs that are not in this machine, for the compilers.
- `target`: the devices of a plan and their memory.
- `cache`: measurements on the disk.
"""
