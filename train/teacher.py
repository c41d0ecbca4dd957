"""The teacher of a distillation: a Hugging Face folder, whose parameters are frozen in bfloat16."""

import dataclasses
import hashlib
import math
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from models.config import LlamaConfig
from models.hf_files import Checkpoint
from models.llama import abstract_parameters
from models.llama_hf import read_config
from train import data
from train.config import TrainConfig
from train.errors import FolderError
from train.formats import number_of
from train.hf_folder import (
    check_finite,
    folder_errors,
    has_tokenizer,
    load_params,
    read_model_config,
)


def teacher_model(config: TrainConfig) -> LlamaConfig | None:
    """The configuration of the teacher, which computes in the dtype of the run's model.

    It is None if the run has no teacher.

    Raises:
      FolderError: The folder cannot be read.
    """
    folder = config.distill.teacher
    if folder is None:
        return None
    like = dataclasses.replace(
        config.model, param_dtype="bfloat16", fp8=None, remat="none", mlp_chunk_size=0
    )
    return read_model_config(folder, like)


def check_teacher(config: TrainConfig) -> None:
    """Checks that a teacher, if there is one, suits the vocabulary, the rows and the mesh of a run.

    Raises:
      FolderError: It does not, or its folder cannot be read.
    """
    folder, teacher = config.distill.teacher, teacher_model(config)
    if folder is None or teacher is None:
        return
    if teacher.vocab_size != config.model.vocab_size:
        raise FolderError(
            f"the teacher in {folder} has a vocabulary of {teacher.vocab_size} tokens, and the "
            f"model one of {config.model.vocab_size}; take a teacher with the model's vocabulary"
        )
    length, longest = config.data.sequence_length, teacher.max_position_embeddings
    if not teacher.fits(length):
        raise FolderError(
            f"the teacher in {folder} has {longest} positions, fewer than the {length} tokens of a "
            "row; choose a shorter --data.sequence-length"
        )
    heads, tensor = teacher.num_key_value_heads, config.mesh.tensor
    if heads % tensor:
        raise FolderError(
            f"the teacher in {folder} has {number_of(heads, 'key/value head')}, which "
            f"mesh.tensor={tensor} does not divide; take mesh.tensor={math.gcd(heads, tensor)}"
        )
    if config.data.is_packed:
        _check_tokenizer(config, folder)


def _check_tokenizer(config: TrainConfig, folder: Path) -> None:
    """Compares the tokens of both tokenizers; random tokens have none."""
    given = config.data.tokenizer
    if not has_tokenizer(folder):
        if given is None:
            return  # bytes, which have no file
        raise FolderError(
            f"the teacher in {folder} has no tokenizer.json to compare with {given}; if its tokens "
            "are the same, copy that tokenizer into its folder"
        )
    of_teacher = data.HuggingFaceTokenizer(folder).vocabulary
    if given is None:
        raise FolderError(
            f"the teacher in {folder} has a tokenizer of {len(of_teacher)} tokens, but the run "
            "reads bytes; name the tokenizer with --data.tokenizer"
        )
    of_run = data.HuggingFaceTokenizer(
        given, bos_token=config.data.bos_token, eos_token=config.data.eos_token
    ).vocabulary
    if differing := sorted(set(of_teacher.items()) ^ set(of_run.items()))[:1]:
        token = differing[0][0]
        raise FolderError(
            f"the vocabulary of the teacher, {folder} with {len(of_teacher)} tokens, is not that "
            f"of the run, {given} with {len(of_run)} tokens: {token!r} is token "
            f"{of_teacher.get(token)} of the teacher and {of_run.get(token)} of the run; take a "
            "teacher with the run's tokenizer"
        )


def teacher_digest(folder: Path) -> str:
    """A hash of a teacher's configuration and of a part of its parameters (`Checkpoint.digest`).

    A run that resumes refuses a teacher with another one, also if it is in the same folder.

    Raises:
      FolderError: A file is missing or damaged.
    """
    with folder_errors():
        content = f"{read_config(folder)} {Checkpoint(folder).digest()}"
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


def load_frozen(config: TrainConfig, mesh: Mesh) -> tuple[nnx.State, ...]:
    """The parameters that no step changes: those of the teacher, if the run has one.

    They are split over the mesh as the run's parameters are.

    Raises:
      FolderError: A file is missing or damaged, or a parameter is not finite.
    """
    folder, teacher = config.distill.teacher, teacher_model(config)
    if folder is None or teacher is None:
        return ()
    params = load_params(folder, teacher, mesh)
    check_finite(str(folder), params, "name another teacher")
    leaves = jax.tree.leaves(params)
    size = sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / 2**30
    print(
        f"teacher {folder}: {sum(leaf.size for leaf in leaves):,} parameters in bfloat16, "
        f"{size:.2f} GiB on each device"
    )
    return (params,)


def abstract_frozen(config: TrainConfig, mesh: Mesh) -> tuple[nnx.State, ...]:
    """The shapes, dtypes and shardings of `load_frozen`.

    Raises:
      FolderError: The folder cannot be read, or the mesh cannot split a parameter.
    """
    teacher = teacher_model(config)
    if teacher is None:
        return ()
    try:
        return (abstract_parameters(teacher, mesh),)
    except ValueError as error:
        raise FolderError(f"the teacher in {config.distill.teacher}: {error}") from error
