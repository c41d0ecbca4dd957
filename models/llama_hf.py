"""Hugging Face Llama checkpoints, read and written: a folder of config.json and safetensors files.

Host memory stays small. While loading, it has one parameter of the Llama (for example one
projection of all layers, stacked and transposed from torch's `[out, in]`) and one tensor of the
file. While saving, it has the tensors of one file. Loading and saving with the same dtype changes
no bit.

`load_pretrained` raises an error for a checkpoint that would compute something else here than in
transformers. Examples are an unknown key in config.json, a tensor too many or too few, or tied
embeddings that differ. It reads only safetensors, never a pickle.
"""

import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import Mesh, Sharding
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from models.config import LlamaConfig
from models.hf_config import config_from_hf, config_to_hf
from models.hf_files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE, Checkpoint, natural, read_json
from models.llama import Llama
from models.sharding import parameter_path, parameter_shardings

_OUTPUT_EMBEDDING = "lm_head.weight"
_INPUT_EMBEDDING = "model.embed_tokens.weight"


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    **overrides: Any,
) -> Llama:
    """The Llama in folder `path`.

    The parameters become float32, whatever dtype the files have. With `param_dtype="bfloat16"` they
    are bfloat16, in half the memory.

    Args:
      path: Folder with config.json and model.safetensors, or its shards and their index.
      dtype: Dtype of the computation, `LlamaConfig.dtype`; `None` leaves it at bfloat16.
      mesh: Devices over which to split the parameters as `models.sharding.parameter_shardings`
        says; no device holds all of them at any time. `None` puts them on the default device.
      **overrides: Fields of `LlamaConfig`, such as `param_dtype`, `scan_layers` or `remat`, that
        replace the values of config.json and our defaults.

    Raises:
      FileNotFoundError: A file is missing; also if the folder has weights only as pickles.
      ValueError: A file is damaged, or the checkpoint and the model differ in configuration,
        tensors or shapes. The message names the file and the tensors.
      NotImplementedError: The model needs a feature that `LlamaConfig` does not have.
    """
    folder = Path(path)
    if dtype is not None:
        overrides["dtype"] = dtype
    config = dataclasses.replace(read_config(folder), **overrides)
    checkpoint, graphdef, state = _checked(folder, config)
    parameters = _parameters(state)
    shardings = [None] * len(parameters)
    if mesh is not None:
        shardings = jax.tree.leaves(parameter_shardings(state, mesh))
    if config.tie_word_embeddings and _OUTPUT_EMBEDDING in checkpoint:
        if not checkpoint.equal(_OUTPUT_EMBEDDING, _INPUT_EMBEDDING):
            raise ValueError(
                f"{folder / CONFIG_FILE} has tie_word_embeddings=true, but {_OUTPUT_EMBEDDING} "
                f"differs from {_INPUT_EMBEDDING}. Set it to false to use both, or remove "
                f"{_OUTPUT_EMBEDDING} from the weights"
            )
    arrays = [p.load(checkpoint, s) for p, s in zip(parameters, shardings, strict=True)]
    return nnx.merge(graphdef, jax.tree.unflatten(jax.tree.structure(state), arrays))


def read_config(path: str | os.PathLike[str]) -> LlamaConfig:
    """The configuration in folder `path`, as `config_from_hf` reads it.

    Raises:
      FileNotFoundError: There is no config.json.
      ValueError: It cannot be read; the message names the file and the field.
      NotImplementedError: The model needs a feature that `LlamaConfig` does not have.
    """
    file = Path(path) / CONFIG_FILE
    if not os.path.lexists(file):
        raise FileNotFoundError(
            f"{file} does not exist; name the folder of a Hugging Face checkpoint"
        )
    content = read_json(file)
    try:
        return config_from_hf(content)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"{file}: {error}") from error


def check_pretrained(path: str | os.PathLike[str], config: LlamaConfig) -> None:
    """Raises unless the headers of the files in folder `path` have the tensors of a model.

    It allocates no array, so a wrong configuration cannot take all memory.

    Raises:
      FileNotFoundError: A file is missing.
      ValueError: A file is damaged, or has other tensors.
    """
    _checked(Path(path), config)


def _checked(folder: Path, config: LlamaConfig) -> tuple[Checkpoint, Any, nnx.State]:
    """The files of a folder with a model's tensors, and the model's structure and shapes."""
    checkpoint = Checkpoint(folder)
    # Names of 10**9 layers would take all memory.
    if config.num_hidden_layers > checkpoint.num_tensors:
        raise ValueError(
            f"{folder} does not fit its {CONFIG_FILE}: num_hidden_layers="
            f"{config.num_hidden_layers}, but its files have {checkpoint.num_tensors} tensors; "
            "take both from one model"
        )
    # Shapes only: nothing is initialized.
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    expected = {name: p.tensor_shape for p in _parameters(state) for name in p.tensor_names}
    if config.tie_word_embeddings and _OUTPUT_EMBEDDING in checkpoint:
        expected[_OUTPUT_EMBEDDING] = expected[_INPUT_EMBEDDING]
    checkpoint.check(expected)
    return checkpoint, graphdef, state


def save_pretrained(
    model: Llama, path: str | os.PathLike[str], *, max_shard_size: int = 5 * 1024**3
) -> None:
    """Writes `model` to folder `path`, for `load_pretrained` and for transformers.

    Tensors have the dtype of the parameters. The files get temporary names, and are renamed at the
    end, config.json last. Then the weights of an earlier checkpoint in `path` are removed.

    If there are several processes, all must call this: they gather one tensor after the other, and
    process 0 writes.

    Args:
      model: Model to write.
      path: Folder, which is made if there is none; its other files stay.
      max_shard_size: Most bytes of tensors in one file. A larger model is written as shards and an
        index, and a larger tensor into a separate file.
    """
    folder = Path(path)
    writes = jax.process_index() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
        hf_config = json.dumps(config_to_hf(model.config), indent=2, sort_keys=True)
        _write_text(_temporary(folder / CONFIG_FILE), hf_config + "\n")
    parameters = _parameters(nnx.state(model, nnx.Param))
    tensors = [tensor for parameter in parameters for tensor in parameter.tensors()]
    shards = _shards(sorted(tensors, key=lambda tensor: natural(tensor.name)), max_shard_size)

    written = []
    weight_map = {}
    for i, shard in enumerate(shards, start=1):
        name = WEIGHTS_FILE
        if len(shards) > 1:
            name = f"model-{i:05}-of-{len(shards):05}.safetensors"
        data = {}
        for tensor in shard:
            array = tensor.fetch()
            if writes:
                data[tensor.name] = array
        if not writes:
            continue
        # transformers refuses a file whose metadata lacks the format.
        save_file(data, _temporary(folder / name), metadata={"format": "pt"})
        # `save_file` lets only the owner read the file. config.json has the mode of a new file.
        shutil.copymode(_temporary(folder / CONFIG_FILE), _temporary(folder / name))
        written.append(name)
        weight_map |= dict.fromkeys(data, name)
        del data
    if not writes:
        return
    if len(shards) > 1:
        total_size = sum(tensor.num_bytes for tensor in tensors)
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        _write_text(_temporary(folder / INDEX_FILE), json.dumps(index, indent=2) + "\n")
        written.append(INDEX_FILE)

    for name in written:
        _temporary(folder / name).replace(folder / name)
    weights = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
    for file in folder.iterdir():
        if weights.fullmatch(file.name) and file.name not in written:
            file.unlink()
    _temporary(folder / CONFIG_FILE).replace(folder / CONFIG_FILE)


@dataclasses.dataclass(frozen=True, slots=True)
class _Parameter:
    """One of our parameters: one tensor of the checkpoint, or one tensor of each layer.

    Attributes:
      path: Path in the model's state, such as `("layers", "mlp", "up_proj", "kernel")`.
      array: The array, or its shape and dtype.
    """

    path: tuple[str, ...]
    array: Any

    @property
    def stacked(self) -> bool:
        return self.path[0] == "layers"

    @property
    def transposed(self) -> bool:
        return self.path[-1] == "kernel"

    @property
    def tensor_names(self) -> list[str]:
        """Hugging Face's names; one for each layer if the parameter is stacked."""
        *modules, leaf = self.path
        name = ".".join([*modules, {"kernel": "weight", "embedding": "weight"}.get(leaf, leaf)])
        if self.stacked:
            suffix = name.removeprefix("layers.")
            return [f"model.layers.{i}.{suffix}" for i in range(self.array.shape[0])]
        return [name if modules[0] == "lm_head" else f"model.{name}"]

    @property
    def tensor_shape(self) -> tuple[int, ...]:
        shape = self.array.shape[1:] if self.stacked else self.array.shape
        return shape[::-1] if self.transposed else shape

    def load(self, checkpoint: Checkpoint, sharding: Sharding | None) -> jax.Array:
        """The parameter on the device, without its copy on the host."""
        host = np.empty(self.array.shape, self.array.dtype)
        for layer, name in enumerate(self.tensor_names):
            tensor = checkpoint.read(name)
            host[layer if self.stacked else ...] = tensor.T if self.transposed else tensor
        if sharding is not None and not sharding.is_fully_addressable:
            # `device_put` would gather the arrays of all processes to compare them.
            array = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
        else:
            array = jax.device_put(host, sharding)
        return array.block_until_ready()  # and so only one parameter is on the host at a time

    def tensors(self) -> "Iterator[_Tensor]":
        for layer, name in enumerate(self.tensor_names):
            yield _Tensor(name, self, layer)


def _parameters(state: nnx.State) -> list[_Parameter]:
    leaves = jax.tree.leaves_with_path(state)
    return [_Parameter(parameter_path(path), leaf) for path, leaf in leaves]


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor to write: `parameter`, or its slice `layer`, under Hugging Face's name."""

    name: str
    parameter: _Parameter
    layer: int

    @property
    def num_bytes(self) -> int:
        itemsize = jnp.dtype(self.parameter.array.dtype).itemsize
        return math.prod(self.parameter.tensor_shape) * itemsize

    def fetch(self) -> np.ndarray:
        array = self.parameter.array
        if self.parameter.stacked:
            # The layer is an argument, so that all layers share one compiled program.
            array = jax.lax.dynamic_index_in_dim(array, self.layer, keepdims=False)
        if not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        return np.ascontiguousarray(array.T if self.parameter.transposed else array)


def _shards(tensors: list[_Tensor], max_shard_size: int) -> list[list[_Tensor]]:
    """Consecutive tensors in shards, as many in each as fit."""
    shards, size = [[]], 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _temporary(file: Path) -> Path:
    return file.with_name(f"{file.name}.tmp")


def _write_text(file: Path, text: str) -> None:
    """Writes a new file; if a link has that name, its target stays as it is."""
    file.unlink(missing_ok=True)
    with open(file, "x") as stream:
        stream.write(text)
