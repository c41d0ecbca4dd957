"""Opens the datasets that a configuration names."""

import functools
import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

from train.config import DataConfig
from train.data.cache import Entry, default_cache_dir, tokenized
from train.data.chat import ChatTemplate, load_chat_template
from train.data.errors import DataError
from train.data.files import (
    RECORD_SUFFIXES,
    Reader,
    find_files,
    has_records,
    suffixes_in,
)
from train.data.held_out import with_both_sides
from train.data.index import SPLITS
from train.data.mixture import MixtureDataset
from train.data.packing import PackedDataset
from train.data.pairs import PairDataset
from train.data.tokenizer import BYTES, HuggingFaceTokenizer, Tokenizer
from train.formats import number_of

type Dataset = PackedDataset | MixtureDataset


def load_tokenizer(config: DataConfig) -> Tokenizer:
    """The tokenizer of a configuration; bytes if the configuration names none.

    Raises:
      DataError: The tokenizer cannot be read, or a token is named for bytes.
    """
    if config.tokenizer is None:
        for name in ("bos_token", "eos_token"):
            if (token := getattr(config, name)) is not None:
                raise DataError(
                    f"--data.{name.replace('_', '-')} {token!r} is for a tokenizer, and bytes have "
                    "none; name one with --data.tokenizer, or leave the flag out"
                )
        return BYTES
    return HuggingFaceTokenizer(
        config.tokenizer, bos_token=config.bos_token, eos_token=config.eos_token
    )


def check_effects(config: DataConfig, given: Collection[str] = ()) -> None:
    """Refuses settings that none of the files in the paths of a configuration needs.

    It lists folders only if there is such a setting.

    Args:
      config: Configuration with a path.
      given: Flags on the command line, which may give the default.

    Raises:
      DataError: A setting that is given, or is not the default, has no effect.
    """
    for name, suffixes in (("token_dtype", {".bin"}), ("text_field", RECORD_SUFFIXES)):
        value, flag = getattr(config, name), f"--data.{name.replace('_', '-')}"
        if flag not in given and value == getattr(DataConfig, name):
            continue
        try:
            found = frozenset().union(*map(suffixes_in, config.path + config.held_out_path))
        except OSError:
            return  # the error of opening the files names the folder
        if found and not found & suffixes:
            raise DataError(
                f"{flag} {value} has no effect, because no file is a "
                f"{' or '.join(sorted(suffixes))} (there are {' '.join(sorted(found))}); leave it "
                "out"
            )


def open_files(
    config: DataConfig, *, vocab_size: int, evaluates: bool
) -> tuple[Dataset, Dataset | None, dict[str, Any]]:
    """Opens the files in `config.path`, and tokenizes those that the cache does not have.

    Args:
      config: Configuration with a path.
      vocab_size: Vocabulary size of the model.
      evaluates: Whether held-out data is needed. If not, its text may be too short.

    Returns:
      Training data, held-out data, and JSON that identifies their tokens.

    Raises:
      DataError: A file cannot be used; the message names the file, the reason and the remedy.
    """
    entries, held_out_entries, fingerprint = _entries(config, vocab_size, evaluates=evaluates)
    train_data = _mixed(config, config.path, entries, "train", config.weights)
    if train_data.num_rows < config.rows_per_step:
        raise DataError(
            f"{', '.join(map(str, config.path))}: {number_of(train_data.num_rows, 'row')} of "
            f"{number_of(config.sequence_length, 'token')}, fewer than the {config.rows_per_step} "
            "rows of a step; use more text, a smaller --data.batch-size or a shorter "
            "--data.sequence-length"
        )
    held_out = None
    if evaluates and held_out_entries:
        held_out = _mixed(config, config.held_out_path, held_out_entries, "held_out", ())
    elif evaluates:
        held_out = _mixed(config, config.path, entries, "held_out", config.weights)
    return train_data, held_out, fingerprint


def tell_of_cut_records(
    paths: tuple[Path, ...], dataset: Dataset, flag: str, *, note: str = ""
) -> None:
    """Prints how many prompts with completions are cut at the ends of rows, for each path.

    Args:
      paths: Paths of the dataset, from `open_files`.
      dataset: Rows of the paths.
      flag: Flag that sets the length of a row.
      note: Text after the path, for held-out rows.
    """
    parts = dataset.sources if isinstance(dataset, MixtureDataset) else (dataset,)
    for path, part in zip(paths, parts, strict=True):
        total, cut, longer = part.count_records()
        if cut:
            print(
                f"{path}{note}: {cut:,} of {total:,} records ({cut / total:.1%}) are cut at the "
                f"end of a row, {longer:,} of them because they have more than "
                f"{part.sequence_length + 1} tokens; the part in a later row is without what comes "
                f"before it, and a longer {flag} cuts fewer",
                flush=True,
            )


def open_preferences(
    config: DataConfig, *, vocab_size: int, evaluates: bool
) -> tuple[PairDataset, PairDataset | None, dict[str, Any]]:
    """Opens the preferences in `config.path`, as `open_files` opens text."""
    entries, held_out_entries, fingerprint = _entries(
        config, vocab_size, evaluates=evaluates, preferences=True
    )

    def pairs(split: str, some: list[Entry]) -> PairDataset:
        dataset = PairDataset([entry.stream(split) for entry in some], config.sequence_length)
        name = split.replace("_", " ")
        print(f"{name}: {number_of(dataset.num_pairs, 'preference')}", flush=True)
        if dataset.num_left_out:
            print(
                f"{name}: {dataset.num_left_out:,} more are left out, because a completion with "
                f"its prompt has more than {config.sequence_length + 1} tokens; "
                "--data.sequence-length makes longer rows",
                flush=True,
            )
        return dataset

    train_data, held_out = pairs("train", entries), None
    needed = config.rows_per_step // 2
    if train_data.num_pairs < needed:
        raise DataError(
            f"{', '.join(map(str, config.path))}: "
            f"{number_of(train_data.num_pairs, 'preference')}, fewer than the {needed} of a "
            "step; use more, a smaller --data.batch-size or a longer --data.sequence-length"
        )
    if evaluates:
        held_out = pairs("held_out", held_out_entries or entries)
        if not held_out.num_pairs:
            raise DataError(f"no preferences are held out; {_held_out_remedy(config)}")
    return train_data, held_out, fingerprint


def _entries(
    config: DataConfig, vocab_size: int, *, evaluates: bool, preferences: bool = False
) -> tuple[list[Entry], list[Entry], dict[str, Any]]:
    """The entries of `config.path`, those of `config.held_out_path`, and what identifies them."""
    tokenizer = load_tokenizer(config)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"{config.tokenizer or 'the byte vocabulary'} has {tokenizer.vocab_size} tokens, more "
            f"than the model's {vocab_size=}; set --model.vocab-size {tokenizer.vocab_size} or more"
        )

    @functools.cache
    def template() -> ChatTemplate | None:
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            return None
        return load_chat_template(tokenizer)

    def entry(path: Path, files: tuple[Path, ...], fraction: float) -> Entry:
        reader = Reader(
            files=files,
            text_field=config.text_field,
            token_dtype=config.token_dtype,
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.eos,
            preferences=preferences,
            chat_template=template() if has_records(files) else None,
        )
        if evaluates and not preferences:
            reader = with_both_sides(reader, fraction, str(path))
        found = _entry(config, tokenizer, path, reader, fraction)
        number = found.index["held_out"]["tokens"]
        if number and not evaluates and fraction < 1:
            print(
                f"{path}: no evaluation reads the {number:,} held-out tokens, because of "
                "--eval-every 0; --data.held-out-fraction 0 trains on them, too",
                flush=True,
            )
        return found

    files = [_files(path) for path in config.path]
    held_out_files = [_files(path) for path in config.held_out_path]
    _check_named_once("--data.path", config.path, files)
    _check_named_once("--data.held-out-path", config.held_out_path, held_out_files)
    trained = {file.resolve() for some in files for file in some}
    for file in itertools.chain(*held_out_files):
        if file.resolve() in trained:
            raise DataError(
                f"{file} is in --data.path and in --data.held-out-path; leave it out of one, "
                "because the loss of text that is trained on says nothing about other text"
            )
    # With held-out text of its own, all of `path` is for training.
    fraction = 0.0 if config.held_out_path else config.held_out_fraction
    entries = [entry(path, some, fraction) for path, some in zip(config.path, files, strict=True)]
    held_out_entries = [
        entry(path, some, 1.0)
        for path, some in zip(config.held_out_path, held_out_files, strict=True)
    ]
    fingerprint = {
        "tokenizer": tokenizer.fingerprint,
        "path": [entry.identity() for entry in entries],
        "held_out_path": [entry.identity() for entry in held_out_entries],
    }
    return entries, held_out_entries, fingerprint


def _check_named_once(flag: str, paths: tuple[Path, ...], files: list[tuple[Path, ...]]) -> None:
    """Refuses a file that two paths have: its text would come twice as often as other text."""
    owners: dict[Path, Path] = {}
    for path, some in zip(paths, files, strict=True):
        for file in some:
            owner = owners.setdefault(file.resolve(), path)
            if owner != path:
                raise DataError(
                    f"{file} is in {owner} and in {path} of {flag}, so its text would come twice; "
                    "leave one of them out"
                )


def _files(path: Path) -> tuple[Path, ...]:
    try:
        return find_files(path)
    except OSError as error:
        raise DataError(
            f"{error.filename or path} cannot be read ({error.strerror}); check permissions"
        ) from error


def _entry(
    config: DataConfig, tokenizer: Tokenizer, path: Path, reader: Reader, fraction: float
) -> Entry:
    entry = tokenized(
        reader,
        tokenizer,
        held_out_fraction=fraction,
        cache_dir=config.cache_dir or default_cache_dir(),
        name=str(path),
    )
    train, held_out = entry.index["train"], entry.index["held_out"]
    # With the fraction 0 the text may be for an evaluation by `python -m train eval`.
    split = held_out if fraction == 1 else train
    amounts = (
        f"{number_of(split['tokens'], 'token')} in {number_of(split['documents'], 'document')}"
    )
    if fraction == 1:
        amounts += ", held out"
    elif fraction:
        share = held_out["tokens"] / max(train["tokens"] + held_out["tokens"], 1)
        of_held_out = number_of(held_out["documents"], "document")
        number = number_of(held_out["tokens"], "token")
        amounts += f" for training, and {number} ({share:.1%}) in {of_held_out} held out"
    print(f"{path}: {amounts}; in {entry.folder}", flush=True)
    if number := entry.index["left_out"]:
        records = "record without text is" if number == 1 else "records without text are"
        print(f"{path}: {number:,} {records} left out", flush=True)
    is_set = config.text_field != DataConfig.text_field
    if is_set and has_records(reader.files) and not entry.index["of_text_field"]:
        print(
            f"{path}: --data.text-field {config.text_field} has no effect, because no record has "
            "this field with text in it; leave the flag out, or name another field",
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
        total = sum(entry.index[name]["tokens"] for name in SPLITS)
        if not total:
            raise DataError(f"{path} is empty: it has no text; name other text, or leave it out")
        if split == "train" and not entry.index[split]["tokens"]:
            raise DataError(
                f"all {total:,} tokens of {path} are held out; name the held-out text with "
                "--data.held-out-path, or set --data.held-out-fraction 0 and --eval-every 0"
            )
        if not entry.index[split]["tokens"]:
            raise DataError(
                f"{path}: no document is held out, of {entry.index['train']['documents']:,}; "
                f"{_held_out_remedy(config)}"
            )
        try:
            parts.append(entry.dataset(split, config.sequence_length))
        except DataError as error:
            part, remedy = "", ""
            if split == "held_out":
                part, remedy = ", held out", f"; {_held_out_remedy(config)}"
            elif held_out := total - entry.index[split]["tokens"]:
                part = f", without {number_of(held_out, 'held-out token')}"
            raise DataError(f"{path}{part}: {error}{remedy}") from error
    if len(parts) == 1:
        return parts[0]
    return MixtureDataset(tuple(parts), weights or tuple(float(part.num_rows) for part in parts))


def _held_out_remedy(config: DataConfig) -> str:
    """How a run gets enough held-out text, or none."""
    if config.held_out_path:  # which refuses a fraction, and --eval-every 0
        return (
            "name more text with --data.held-out-path, or leave it out and turn evaluations off "
            "with --eval-every 0"
        )
    return (
        "raise --data.held-out-fraction, name other text with --data.held-out-path, or turn "
        "evaluations off with --eval-every 0"
    )
