"""Times the loader: tokenizing into the cache, and building batches from it.

    python -m benchmarks.training.data --megabytes 64

The text is the source of Python's standard library, repeated; each JSON line is one source file.
The tokenizer is a byte-level BPE trained on that text, unless `--tokenizer` names another.
Tokenizing is timed once, from the text to the finished cache. Batches are built in one thread; the
table has the median over the rounds. The operating system keeps the files in memory, so the disk is
not measured.
"""

import argparse
import contextlib
import dataclasses
import io
import json
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks import command, tables
from train import data
from train.config import DataConfig

_VOCAB_SIZE = 32_000


def main() -> None:
    """Parses the command line, measures and prints the table."""
    parser = command.parser("benchmarks.training.data", __doc__)
    parser.add_argument("--megabytes", type=float, default=64, help="text to tokenize")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--sequence-length", type=int, default=4096)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        print(report(Path(folder), arguments))


def report(folder: Path, arguments: argparse.Namespace) -> str:
    """The table, in Markdown."""
    texts = [text.decode(errors="replace") for text in data.stdlib_corpus().files.values()]
    tokenizer = arguments.tokenizer or train_tokenizer(texts, folder / "tokenizer.json")
    path = folder / "text.jsonl"
    write_text(texts, path, int(arguments.megabytes * 10**6))
    base = DataConfig(
        source="stdlib",
        path=(path,),
        cache_dir=folder / "cache",
        sequence_length=arguments.sequence_length,
        batch_size=arguments.batch_size,
    )
    lines = [
        f"{time.strftime('%Y-%m-%d')}, {platform.machine()}, {os.cpu_count()} cores, "
        f"tokenizers {tokenizers.__version__}, {arguments.megabytes:g} MB of JSON lines; batches "
        f"of {arguments.batch_size} x {arguments.sequence_length}",
        "",
    ]
    rows, datasets = [], {}
    for name, chosen in (("bytes", None), ("BPE", tokenizer)):
        config = dataclasses.replace(base, tokenizer=chosen)
        dataset, seconds = opened(config)
        num_tokens = len(dataset.tokens)
        rows.append(row(f"tokenizing, {name}", num_tokens, seconds, arguments.megabytes))
        datasets[f"batches, {name}"], seconds = opened(config)
        rows.append(row(f"opening the cache, {name}", None, seconds))
    # The sources of a mixture share a vocabulary.
    source = datasets["batches, BPE"]
    datasets["batches, two sources by weight"] = data.MixtureDataset((source, source), (0.7, 0.3))
    for name, dataset in datasets.items():
        times = []
        for step in range(arguments.rounds):
            start = time.perf_counter()
            dataset.batch(step, batch_size=arguments.batch_size, seed=0)
            times.append(time.perf_counter() - start)
        num_tokens = arguments.batch_size * arguments.sequence_length
        rows.append(row(name, num_tokens, statistics.median(times)))
    columns = ["what", "tokens/s", "MB/s of text", "ms"]
    return "\n".join([*lines, *tables.markdown(columns, rows)])


def train_tokenizer(texts: list[str], path: Path, vocab_size: int = _VOCAB_SIZE) -> Path:
    """Trains a byte-level BPE tokenizer on the texts and writes it to `path`."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore
    tokenizer.decoder = decoders.ByteLevel()  # pyright: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))
    return path


def write_text(texts: list[str], path: Path, num_bytes: int) -> None:
    """Writes at least `num_bytes` of JSON lines, no two of them equal."""
    with path.open("w") as file:
        for index in range(10**9):
            text = f"# {index}\n{texts[index % len(texts)]}"
            file.write(json.dumps({"text": text}) + "\n")
            if file.tell() >= num_bytes:
                return


def opened(config: DataConfig) -> tuple[data.PackedDataset, float]:
    """Opens the training data; returns it and the seconds that this took."""
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        dataset: Any = data.open_files(config, vocab_size=1 << 20, evaluates=False)[0]
    return dataset, time.perf_counter() - start


def row(
    name: str, num_tokens: int | None, seconds: float, megabytes: float | None = None
) -> list[str]:
    """A row of the table."""
    speed = "-" if num_tokens is None else f"{num_tokens / seconds:,.0f}"
    text_speed = "-" if megabytes is None else f"{megabytes / seconds:.0f}"
    return [name, speed, text_speed, f"{seconds * 1e3:,.1f}"]


if __name__ == "__main__":
    main()
