"""The datasets that a configuration names."""

from pathlib import Path
from typing import Any

from train.config import DataConfig
from train.data.cache import Entry, default_cache_dir, tokenized
from train.data.errors import DataError
from train.data.files import Reader, find_files
from train.data.mixture import MixtureDataset
from train.data.packing import PackedDataset
from train.data.tokenizer import BYTES, HuggingFaceTokenizer, Tokenizer

type Dataset = PackedDataset | MixtureDataset


def load_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer of a configuration; bytes if the configuration names none.

    Raises:
      DataError: the tokenizer cannot be read.
    """
    if config.tokenizer is None:
        return BYTES
    return HuggingFaceTokenizer(
        config.tokenizer, bos_token=config.bos_token, eos_token=config.eos_token
    )


def open_files(
    config: DataConfig, *, vocab_size: int, evaluates: bool
) -> tuple[Dataset, Dataset | None, dict[str, Any]]:
    """Opens the files in `config.path`, and tokenizes those that the cache does not have.

    Args:
      config: configuration with a path.
      vocab_size: vocabulary size of the model.
      evaluates: whether held-out data is needed. If not, its text may be too short.

    Returns:
      Training data, held-out data, and JSON that identifies their tokens.

    Raises:
      DataError: a file cannot be used; the message names the file, the reason and the remedy.
    """
    tokenizer = load_tokenizer(config)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"{config.tokenizer or 'the byte vocabulary'} has {tokenizer.vocab_size} tokens, more "
            f"than the model's {vocab_size=}; set --model.vocab-size {tokenizer.vocab_size} or more"
        )
    # With held-out text of its own, all of `path` is for training.
    fraction = 0.0 if config.held_out_path else config.held_out_fraction
    entries = [_entry(config, tokenizer, path, fraction) for path in config.path]
    held_out_entries = [_entry(config, tokenizer, path, 1.0) for path in config.held_out_path]
    train_data = _mixed(config, config.path, entries, "train", config.weights)
    if isinstance(train_data, PackedDataset) and train_data.num_rows < config.rows_per_step:
        raise DataError(
            f"{config.path[0]} makes {train_data.num_rows} rows of {config.sequence_length} tokens,"
            f" fewer than the {config.rows_per_step} rows of a step; use more text, a smaller "
            "--data.batch-size or a shorter --data.sequence-length"
        )
    held_out = None
    if evaluates and held_out_entries:
        held_out = _mixed(config, config.held_out_path, held_out_entries, "held_out", ())
    elif evaluates:
        held_out = _mixed(config, config.path, entries, "held_out", config.weights)
    fingerprint = {
        "tokenizer": tokenizer.fingerprint,
        "path": [entry.identity() for entry in entries],
        "held_out_path": [entry.identity() for entry in held_out_entries],
    }
    return train_data, held_out, fingerprint


def _entry(config: DataConfig, tokenizer: Tokenizer, path: Path, fraction: float) -> Entry:
    try:
        files = find_files(path)
    except OSError as error:
        raise DataError(
            f"{error.filename or path} cannot be read ({error.strerror}); check permissions"
        ) from error
    reader = Reader(
        files=files,
        text_field=config.text_field,
        token_dtype=config.token_dtype,
        vocab_size=tokenizer.vocab_size,
        end_of_text=tokenizer.eos,
    )
    entry = tokenized(
        reader,
        tokenizer,
        held_out_fraction=fraction,
        cache_dir=config.cache_dir or default_cache_dir(),
        name=str(path),
    )
    train, held_out = entry.index["train"], entry.index["held_out"]
    print(
        f"{path}: {train['tokens']:,} tokens in {train['documents']:,} documents, "
        f"{held_out['tokens']:,} in {held_out['documents']:,} held out; in {entry.folder}",
        flush=True,
    )
    return entry


def _mixed(
    config: DataConfig,
    paths: tuple[Path, ...],
    entries: list[Entry],
    split: str,
    weights: tuple[float, ...],
) -> Dataset:
    """One split of all sources. Without `weights`, a source counts by its number of rows."""
    parts = []
    for path, entry in zip(paths, entries, strict=True):
        try:
            parts.append(entry.dataset(split, config.sequence_length))
        except DataError as error:
            remedy = "" if split == "train" else f"; {_HELD_OUT_REMEDY}"
            raise DataError(f"{path}, {split.replace('_', ' ')}: {error}{remedy}") from error
    if len(parts) == 1:
        return parts[0]
    return MixtureDataset(tuple(parts), weights or tuple(float(part.num_rows) for part in parts))


_HELD_OUT_REMEDY = (
    "raise --data.held-out-fraction, name other text with --data.held-out-path, or turn "
    "evaluations off with --eval-every 0"
)
