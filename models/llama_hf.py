"""Hugging Face Llama checkpoints, read and written: a folder of config.json and safetensors files.

`load_pretrained` and `save_pretrained` go tensor by tensor. Loading holds one parameter of ours on
the host (the layers of a projection stacked, transposed from torch's `[out, in]`) and one tensor of
the file; saving holds one file's tensors. Loading and saving with the same dtype changes no bit.

A checkpoint that would compute something else here than in transformers is refused: an unknown key
of config.json, a tensor too many or too few. Only safetensors is read, never a pickle.
"""

import dataclasses
import json
import math
import os
import re
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
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from models.llama import Llama, LlamaConfig
from models.rope import OPTIONAL_FIELDS, REQUIRED_FIELDS, RopeParameters
from models.sharding import parameter_path, parameter_shardings

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

# What transformers takes where config.json says nothing or null. The sizes have no default here.
_CONFIG_DEFAULTS: dict[str, Any] = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "head_dim": None,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "num_key_value_heads": None,
    "pad_token_id": None,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}
_CONFIG_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
_ROPE_KEYS = (
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
)
# Keys that do not change what the model computes: where it comes from, how transformers runs it,
# what its outputs look like, and the generation settings that old versions kept here.
_BOOKKEEPING = set(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _name_or_path architectures
    attn_implementation chunk_size_feed_forward dtype finetuning_task id2label is_decoder
    is_encoder_decoder label2id max_sequence_length model_type name_or_path output_attentions
    output_hidden_states output_scores prefix pretraining_tp problem_type return_dict
    task_specific_params tokenizer_class torch_dtype torchscript transformers_version
    unsloth_fixed unsloth_version use_bfloat16 use_cache
    bad_words_ids begin_suppress_tokens decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty
    forced_bos_token_id forced_eos_token_id length_penalty max_length min_length
    no_repeat_ngram_size num_beam_groups num_beams num_return_sequences remove_invalid_values
    repetition_penalty return_dict_in_generate sep_token_id suppress_tokens temperature
    tie_encoder_decoder top_k top_p typical_p
    """.split()
)


def config_from_hf(hf_config: dict[str, Any]) -> LlamaConfig:
    """The `LlamaConfig` of a config.json, with our own fields (`dtype`, `remat` ...) at defaults.

    Reads all three forms of the rotary settings: `rope_parameters` (transformers 5), and
    `rope_theta` with a `rope_scaling` that has a `rope_type` or the older `type`, or is null. Where
    both are there `rope_scaling` wins, as in transformers.

    Raises:
      ValueError: not a Llama, a size is missing, or a key is unknown and may change the function.
      NotImplementedError: the model needs what `LlamaConfig` does not implement.
    """
    if (model_type := hf_config.get("model_type")) != "llama":
        raise ValueError(f"{model_type=}, only 'llama' is supported")
    if missing := [name for name in _CONFIG_SIZES if hf_config.get(name) is None]:
        raise ValueError(f"the configuration lacks {missing}")
    known = {*_CONFIG_SIZES, *_CONFIG_DEFAULTS, *_ROPE_KEYS, *_BOOKKEEPING}
    unknown = {
        key: value
        for key, value in hf_config.items()
        if key not in known and value not in (None, {}, [])
    }
    if unknown:
        raise ValueError(
            f"unknown configuration keys, which may change what the model computes: {unknown}. "
            "Remove them from the configuration if they do not"
        )

    fields = {name: hf_config[name] for name in _CONFIG_SIZES}
    for name, default in _CONFIG_DEFAULTS.items():
        # An absent token is null in the file; everywhere else null means the default.
        given = hf_config.get(name, default)
        fields[name] = default if given is None and not name.endswith("token_id") else given
    if fields["num_key_value_heads"] is None:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if fields["head_dim"] is None:
        del fields["head_dim"]
    for name in ("attention_dropout", "initializer_range", "rms_norm_eps"):
        fields[name] = float(fields[name])
    if isinstance(fields["eos_token_id"], list):
        fields["eos_token_id"] = tuple(fields["eos_token_id"])
    rope = _rope_from_hf(hf_config, fields["max_position_embeddings"])
    return LlamaConfig(**fields, rope_parameters=rope)


def _rope_from_hf(hf_config: dict[str, Any], max_position_embeddings: int) -> RopeParameters:
    settings = dict(hf_config.get("rope_scaling") or hf_config.get("rope_parameters") or {})
    older_type = settings.pop("type", "default")
    rope_type = settings.pop("rope_type", older_type)
    if rope_type not in REQUIRED_FIELDS:
        raise ValueError(f"{rope_type=} must be one of {sorted(REQUIRED_FIELDS)}")
    theta = settings.pop("rope_theta", None) or hf_config.get("rope_theta") or 10_000.0
    partial = settings.pop("partial_rotary_factor", hf_config.get("partial_rotary_factor"))
    if partial not in (None, 1):
        raise ValueError(f"partial_rotary_factor={partial}: Llama rotates whole heads")
    settings.pop("finetuned", None)  # a remark in the first YaRN checkpoints
    fields = {field.name for field in dataclasses.fields(RopeParameters)}
    unknown = {k: v for k, v in settings.items() if k not in fields and v is not None}
    if unknown:
        raise ValueError(f"unknown rope parameters, which may change the rotation: {unknown}")

    # Like transformers, leave aside the settings that another rope type would read.
    read = (*REQUIRED_FIELDS[rope_type], *OPTIONAL_FIELDS[rope_type])
    values = {name: settings[name] for name in read if settings.get(name) is not None}
    if (name := "original_max_position_embeddings") in read:
        values[name] = hf_config.get(name) or values.get(name, max_position_embeddings)
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(float(v) for v in value)
        elif name not in ("original_max_position_embeddings", "truncate"):
            values[name] = float(value)
    return RopeParameters(rope_type=rope_type, rope_theta=float(theta), **values)


def config_to_hf(config: LlamaConfig) -> dict[str, Any]:
    """The content of config.json, for transformers 5 and, by the legacy keys, for 4.43 and later.

    Except that the rules of "yarn" and "longrope" were others in 4.46, with other logits.
    """
    hf_config = {
        name: getattr(config, name) for name in sorted({*_CONFIG_SIZES, *_CONFIG_DEFAULTS})
    }
    if isinstance(config.eos_token_id, tuple):
        hf_config["eos_token_id"] = list(config.eos_token_id)
    rope = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in dataclasses.asdict(config.rope_parameters).items()
        if value is not None
    }
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    return hf_config | {
        "architectures": ["LlamaForCausalLM"],
        "dtype": config.param_dtype,
        "model_type": "llama",
        "rope_parameters": rope,
        "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        "rope_theta": config.rope_parameters.rope_theta,
        "torch_dtype": config.param_dtype,
        "use_cache": True,
    }


def load_pretrained(
    path: str | os.PathLike[str],
    *,
    dtype: DTypeLike | None = None,
    mesh: Mesh | None = None,
    **overrides: Any,
) -> Llama:
    """The Llama in folder `path`.

    The parameters become float32 whatever dtype the files have; `param_dtype="bfloat16"` keeps (or
    rounds to) bfloat16 and halves the memory.

    Args:
      path: a folder with config.json and model.safetensors, or its shards and their index.
      dtype: of the computation, `LlamaConfig.dtype`; `None` leaves it at bfloat16.
      mesh: where to split the parameters over, as `models.sharding.parameter_shardings` says; they
        never lie on one device whole. `None` puts them on the default device.
      **overrides: fields of `LlamaConfig` to set differently from config.json and our defaults,
        such as `param_dtype`, `scan_layers` or `remat`.

    Raises:
      FileNotFoundError: a file is missing; also where there are weights, but as pickles.
      ValueError: a file is damaged, or the checkpoint and the model differ in configuration,
        tensors or shapes. The message names the file and the tensors.
    """
    folder = Path(path)
    config_file = folder / CONFIG_FILE
    if not config_file.is_file():
        raise FileNotFoundError(f"{config_file} does not exist: not a Hugging Face checkpoint")
    try:
        config = config_from_hf(json.loads(config_file.read_text()))
    except ValueError as error:
        raise ValueError(f"{config_file}: {error}") from error
    if dtype is not None:
        overrides["dtype"] = dtype
    config = dataclasses.replace(config, **overrides)

    # Shapes only: nothing is initialized.
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    leaves, structure = jax.tree_util.tree_flatten_with_path(state)
    parameters = [_Parameter(parameter_path(path), leaf) for path, leaf in leaves]
    shardings = [None] * len(leaves)
    if mesh is not None:
        shardings = jax.tree.leaves(parameter_shardings(state, mesh))
    checkpoint = _Checkpoint(folder)
    checkpoint.check(
        {name: p.tensor_shape for p in parameters for name in p.tensor_names},
        ignored="lm_head.weight" if config.tie_word_embeddings else None,
    )
    arrays = [p.load(checkpoint, s) for p, s in zip(parameters, shardings, strict=True)]
    return nnx.merge(graphdef, structure.unflatten(arrays))


def save_pretrained(
    model: Llama, path: str | os.PathLike[str], *, max_shard_size: int = 5 * 1024**3
) -> None:
    """Writes `model` to folder `path`, for `load_pretrained` and for transformers.

    Tensors have the dtype of the parameters. Files are written under temporary names and renamed at
    the end, config.json last. The weights of an earlier checkpoint in `path` are removed.

    Of several processes all must call this: they gather one tensor after the other, and process 0
    writes.

    Args:
      model: the model to write.
      path: the folder; it is made if there is none, and other files in it stay.
      max_shard_size: bytes of tensors in one file; more go to shards with an index. A larger tensor
        gets a file of its own.
    """
    folder = Path(path)
    writes = jax.process_index() == 0
    if writes:
        folder.mkdir(parents=True, exist_ok=True)
    arrays, _ = jax.tree_util.tree_flatten_with_path(nnx.state(model, nnx.Param))
    parameters = [_Parameter(parameter_path(path), array) for path, array in arrays]
    tensors = [tensor for parameter in parameters for tensor in parameter.tensors()]
    shards = _shards(sorted(tensors, key=lambda tensor: _natural(tensor.name)), max_shard_size)

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
        written.append(name)
        weight_map |= dict.fromkeys(data, name)
        del data
    if not writes:
        return
    if len(shards) > 1:
        total_size = sum(tensor.num_bytes for tensor in tensors)
        index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
        _temporary(folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
        written.append(INDEX_FILE)
    hf_config = json.dumps(config_to_hf(model.config), indent=2, sort_keys=True)
    _temporary(folder / CONFIG_FILE).write_text(hf_config + "\n")

    for name in written:
        _temporary(folder / name).replace(folder / name)
    weights = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?")
    for file in folder.iterdir():
        if weights.fullmatch(file.name) and file.name not in written:
            file.unlink()
    _temporary(folder / CONFIG_FILE).replace(folder / CONFIG_FILE)


@dataclasses.dataclass(frozen=True, slots=True)
class _Parameter:
    """One of our parameters, which is one tensor of the checkpoint or one of each layer.

    Attributes:
      path: in the model's state, such as `("layers", "mlp", "up_proj", "kernel")`.
      array: it, or its shape and dtype.
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
        """Hugging Face's names, by layer if there are layers."""
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

    def load(self, checkpoint: "_Checkpoint", sharding: Sharding | None) -> jax.Array:
        """The parameter on the device; its host copy is gone on return."""
        host = np.empty(self.array.shape, self.array.dtype)
        for layer, name in enumerate(self.tensor_names):
            tensor = checkpoint.read(name)
            host[layer if self.stacked else ...] = tensor.T if self.transposed else tensor
        if sharding is not None and not sharding.is_fully_addressable:
            # `device_put` would gather what all processes have, to compare it.
            return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
        return jax.device_put(host, sharding).block_until_ready()

    def tensors(self) -> "Iterator[_Tensor]":
        for layer, name in enumerate(self.tensor_names):
            yield _Tensor(name, self, layer)


@dataclasses.dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor to be written: `parameter`, or its slice `layer`, under Hugging Face's name."""

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
            # The layer is an argument of this, so that all layers share one compilation.
            array = jax.lax.dynamic_index_in_dim(array, self.layer, keepdims=False)
        if not array.is_fully_addressable:
            array = multihost_utils.process_allgather(array, tiled=True)
        return np.ascontiguousarray(array.T if self.parameter.transposed else array)


class _Checkpoint:
    """The safetensors files of a folder; a tensor is read when it is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder
        if (folder / WEIGHTS_FILE).is_file():
            self._files = {WEIGHTS_FILE: _open(folder / WEIGHTS_FILE)}
            self._file_of = dict.fromkeys(self._files[WEIGHTS_FILE].keys(), WEIGHTS_FILE)
        elif (folder / INDEX_FILE).is_file():
            self._file_of = _read_index(folder / INDEX_FILE)
            self._files = {name: _open(folder / name) for name in set(self._file_of.values())}
            for tensor, file in self._file_of.items():
                if tensor not in self._files[file].keys():
                    raise ValueError(f"{folder / file} lacks {tensor!r}, which {INDEX_FILE} names")
        else:
            pickles = [f.name for f in folder.iterdir() if f.suffix in (".bin", ".pt", ".pth")]
            remedy = (
                f"; {sorted(pickles)} are not read, because unpickling runs the code in a file: "
                "save the model again with transformers, as safetensors"
            )
            raise FileNotFoundError(
                f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}{remedy if pickles else ''}"
            )

    def check(self, expected: dict[str, tuple[int, ...]], *, ignored: str | None) -> None:
        """Raises a ValueError unless the tensors are those expected, in shape and kind."""
        # Checkpoints of before 2023 keep the rotary frequencies, which the configuration gives.
        found = {
            name
            for name in self._file_of
            if not name.endswith(".rotary_emb.inv_freq") and name != ignored
        }
        problems = [f"{name} is missing" for name in sorted(expected.keys() - found, key=_natural)]
        for name in sorted(found, key=_natural):
            tensor = self._files[self._file_of[name]].get_slice(name)
            shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
            where = f"{name} in {self._file_of[name]}"
            if name not in expected:
                problems.append(f"{where}, of shape {shape}, is not part of the model")
            elif shape != expected[name]:
                problems.append(f"{where} has shape {shape}, expected {expected[name]}")
            elif dtype not in ("F64", "F32", "F16", "BF16"):
                problems.append(f"{where} has dtype {dtype}, expected a float of 16 bits or more")
        if problems:
            more = f"\n... and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise ValueError(
                f"{self.folder} does not fit its {CONFIG_FILE}:\n" + "\n".join(problems[:20]) + more
            )

    def read(self, name: str) -> np.ndarray:
        return self._files[self._file_of[name]].get_tensor(name)


def _open(file: Path) -> safe_open:
    if not file.is_file():
        raise FileNotFoundError(f"{file}, which {INDEX_FILE} names, does not exist")
    try:
        return safe_open(file, framework="numpy")
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged or incomplete: {error}") from error


def _read_index(file: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(file.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise ValueError(f"{file} is not an index of tensors: {error!r}") from error
    if outside := sorted(name for name in weight_map.values() if Path(name).name != name):
        raise ValueError(f"{file} names files outside of its folder: {outside}")
    return weight_map


def _shards(tensors: list[_Tensor], max_shard_size: int) -> list[list[_Tensor]]:
    """Consecutive tensors, as many to a shard as fit."""
    shards, size = [[]], 0
    for tensor in tensors:
        if shards[-1] and size + tensor.num_bytes > max_shard_size:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.num_bytes
    return shards


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts layer 10 after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _temporary(file: Path) -> Path:
    return file.with_name(f"{file.name}.tmp")
