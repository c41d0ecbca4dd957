"""The benchmark of the loader, on little text."""

import argparse

from benchmarks.training import data as benchmark
from train import data


def test_table(tmp_path, monkeypatch):
    files = {f"{i}.py": b"def f(x):\n    return x + %d\n" % i for i in range(50)}
    monkeypatch.setattr(data, "stdlib_corpus", lambda: data.Corpus(files))
    monkeypatch.setattr(benchmark, "_VOCAB_SIZE", 300)
    arguments = argparse.Namespace(
        megabytes=0.05, tokenizer=None, sequence_length=32, batch_size=4, rounds=3
    )
    table = [line for line in benchmark.report(tmp_path, arguments).splitlines() if "|" in line]
    names = [line.split("|")[1].strip() for line in table[2:]]
    assert names == [
        *["tokenizing, bytes", "opening the cache, bytes", "tokenizing, BPE"],
        *["opening the cache, BPE", "batches, bytes", "batches, BPE"],
        "batches, two sources by weight",
    ]
    for line in table[2:]:
        speed, megabytes, milliseconds = (cell.strip() for cell in line.split("|")[2:5])
        assert float(milliseconds.replace(",", "")) > 0
        assert (speed == "-") == line.startswith("| opening")
        assert (megabytes == "-") != line.startswith("| tokenizing")
