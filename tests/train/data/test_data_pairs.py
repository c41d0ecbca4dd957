"""Preferences: their tokens, their rows, and errors in their files."""

import dataclasses
import itertools
import json
from typing import Any

import numpy as np
import pytest

from support.tokenizer_files import TEMPLATE, write_byte_level, write_config
from train import data
from train.config import DataConfig
from train.data import BOS, EOS, IGNORED, cache
from train.data.chat import load_chat_template


def record(i, length=3):
    return {
        "prompt": f"p{i}:",
        "chosen": "c" * (i % length),  # some are empty
        "rejected": f"r{i}" * (1 + i % 2),
    }


def messages(prompt, chosen, rejected):
    of = lambda role, content: [{"role": role, "content": content}]
    return {
        "prompt": of("user", prompt),
        "chosen": of("assistant", chosen),
        "rejected": of("assistant", rejected),
    }


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def config(tmp_path):
    return DataConfig(
        source="stdlib",
        path=(write(tmp_path / "a.jsonl", map(record, range(60))),),
        cache_dir=tmp_path / "cache",
        held_out_fraction=0.25,
        sequence_length=10,
        batch_size=4,
    )


def opened(config, evaluates=True, vocab_size=320) -> Any:
    return data.open_preferences(config, vocab_size=vocab_size, evaluates=evaluates)


def tokens_of(record):
    """The prompt, and both sequences, as bytes."""
    prompt = [BOS, *record["prompt"].encode()]
    return prompt, [[*prompt, *record[name].encode(), EOS] for name in ("chosen", "rejected")]


def rows_of(record, length):
    """Tokens and labels of both rows, by hand."""
    prompt, sequences = tokens_of(record)
    for tokens in sequences:
        labels = [IGNORED if i < len(prompt) else token for i, token in enumerate(tokens)][1:]
        rest = length - len(labels)
        yield (*tokens[:-1], *[0] * rest), (*labels, *[IGNORED] * rest)


def in_rows(batch):
    """Tokens and labels of each row, as tuples."""
    arrays = (map(tuple, batch[name].tolist()) for name in ("tokens", "labels"))
    return list(zip(*arrays, strict=True))


def all_rows(dataset):
    """Tokens and labels of all rows in order."""
    return in_rows(dataset.expand(np.arange(2 * dataset.num_pairs)))


def test_rows_are_those_of_the_records(config, capsys):
    train, held_out, _ = opened(config)
    fitting = [record(i) for i in range(60) if max(map(len, tokens_of(record(i))[1])) <= 10 + 1]
    found = all_rows(train) + all_rows(held_out)
    wanted = [tuple(rows_of(r, 10)) for r in fitting]
    # Both rows of a pair are on the same side.
    pairs = list(itertools.batched(found, 2))
    assert sorted(pairs) == sorted(wanted)
    assert 5 < held_out.num_pairs < 30
    assert train.num_left_out + held_out.num_left_out == 60 - len(fitting) > 0
    printed = capsys.readouterr().out
    assert f"train: {train.num_left_out} more are left out" in printed
    assert "more than 11 tokens; --data.sequence-length" in printed


def test_batches_are_a_function_of_the_step(config):
    train, _, _ = opened(config)
    pairs = list(itertools.batched(all_rows(train), 2))
    epoch = []
    for step in range(2 * train.num_pairs // 4):
        batch = train.batch(step, batch_size=4, seed=3)
        epoch += itertools.batched(in_rows(batch), 2)
        part = train.batch(step, batch_size=4, seed=3, rows=np.array([3, 0]))
        np.testing.assert_array_equal(part["labels"], batch["labels"][[3, 0]])
    assert epoch != pairs[: len(epoch)]
    assert len({*epoch}) == len(epoch) and {*epoch} <= {*pairs}  # no pair comes twice
    np.testing.assert_array_equal(
        train.pairs_of_steps(3, batch_size=4, seed=3),
        sorted(pairs.index(pair) for pair in epoch[:6]),
    )
    every = train.pairs_of_steps(1000, batch_size=4, seed=3)
    np.testing.assert_array_equal(every, np.arange(train.num_pairs))


def test_evaluations_fill_up_the_last_batch(config):
    _, held_out, _ = opened(config)
    number = held_out.num_pairs
    batches = list(held_out.eval_batches(8))
    assert [len(batch["tokens"]) for batch in batches] == [8] * -(-number // 4)
    labels = np.concatenate([batch["labels"] for batch in batches])
    assert np.all(np.any(labels[: 2 * number] != IGNORED, axis=1))
    assert np.all(labels[2 * number :] == IGNORED)
    (some,) = held_out.eval_batches(4, 1)
    everything = all_rows(held_out)
    assert in_rows(some) == everything[:2] + everything[number // 2 * 2 :][:2]


def test_the_reference_goes_with_its_rows(config):
    train, _, _ = opened(config)
    reference = np.arange(2 * train.num_pairs, dtype=np.float32).reshape(-1, 2)
    train = dataclasses.replace(train, reference=reference)
    rows = np.array([5, 0, -1, 2])
    batch = train.expand(rows)
    assert batch["reference"].tolist() == [[5], [0], [0], [2]]
    assert np.all(batch["labels"][2] == IGNORED)


def test_several_files_and_parquet(config, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    columns = {name: [record(i)[name] for i in range(60, 80)] for name in record(0)}
    pq.write_table(pa.table(columns | {"score": list(range(20))}), tmp_path / "b.parquet")
    both = dataclasses.replace(
        config, path=(*config.path, tmp_path / "b.parquet"), held_out_fraction=0.0
    )
    train, _, _ = opened(both, evaluates=False)
    fitting = [i for i in range(80) if max(map(len, tokens_of(record(i))[1])) <= 10 + 1]
    wanted = [row for i in fitting for row in rows_of(record(i), 10)]
    assert all_rows(train) == wanted


@pytest.fixture
def tokenizer(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_byte_level(folder / "tokenizer.json")
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    write_config(folder, chat_template=TEMPLATE, **names)
    return folder


def test_messages_are_written_by_the_chat_template(config, tokenizer, tmp_path):
    records = [messages("hi", "good é", "bad"), messages("x", "y", "z")]
    config = dataclasses.replace(
        config,
        path=(write(tmp_path / "m.jsonl", records),),
        tokenizer=tokenizer,
        held_out_fraction=0.0,
        sequence_length=40,
        batch_size=2,
    )
    train, _, _ = opened(config, evaluates=False)
    loaded = data.HuggingFaceTokenizer(tokenizer)
    encode = lambda text: loaded.encode([text.encode()])[0].tolist()
    prompt = encode("<|begin_of_text|>[user]hi[assistant]")
    sequences = [prompt + encode(f"{answer}<|end_of_text|>") for answer in ("good é", "bad")]
    assert prompt[0] == loaded.bos and sequences[0][-1] == loaded.eos
    for (tokens, labels), sequence in zip(all_rows(train)[:2], sequences, strict=True):
        size = len(sequence) - 1
        assert tokens[:size] == tuple(sequence[:-1])
        assert labels[len(prompt) - 1 : size] == tuple(sequence[len(prompt) :])
        assert {*labels[: len(prompt) - 1], *labels[size:]} == {IGNORED}
    # Another template makes other tokens.
    before = train.streams[0].tokens.tolist()
    (tokenizer / "chat_template.jinja").write_text("!" + TEMPLATE)
    after = opened(config, evaluates=False)[0].streams[0].tokens.tolist()
    assert before != after


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no system message') }}", r"m\.jsonl:1: .*no system message.*repair"),
        ("{{ messages | length }}", r"m\.jsonl:1: .* does not put 'chosen' after the prompt"),
        ("{{ strftime_now('%d') }}", r"m\.jsonl:1: .*'strftime_now' is undefined"),
        ("{% for m in messages %}", r"m\.jsonl:1: the chat template .* is malformed"),
        ("{{ messages.__class__.mro() }}", r"m\.jsonl:1: .*unsafe"),
        (None, r"m\.jsonl:1: messages need a chat template; .*--data\.tokenizer"),
    ],
)
def test_templates_that_cannot_be_used(template, message, config, tokenizer, tmp_path):
    options = {} if template is None else {"chat_template": template}
    write_config(tokenizer, eos_token="<|end_of_text|>", **options)
    path = write(tmp_path / "m.jsonl", [messages("hi", "a", "b")] * 4)
    with pytest.raises(data.DataError, match=message):
        opened(dataclasses.replace(config, path=(path,), tokenizer=tokenizer))


def test_templates_with_names(tokenizer):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write_config(tokenizer, eos_token="<|end_of_text|>", chat_template=named)
    template = load_chat_template(data.HuggingFaceTokenizer(tokenizer))
    assert template is not None and template.text == "d"


GOOD = record(1)
MESSAGES = messages("a", "b", "c")
CASES = {
    "no chosen": ({"prompt": "x", "rejected": "y"}, r":2: no field 'chosen'; .*\"rejected\""),
    "a number": (GOOD | {"chosen": 3}, r":2: 'chosen' is 3, not a text"),
    "text and messages": (
        GOOD | {"chosen": MESSAGES["chosen"]},
        r":2: messages need a chat template",
    ),
    "a text of sft": ({"text": "x"}, r":2: no field 'prompt', 'chosen', 'rejected'"),
}


@pytest.mark.parametrize("name", CASES)
def test_malformed_records(name, config):
    bad, message = CASES[name]
    write(config.path[0], [GOOD, bad])
    with pytest.raises(data.DataError, match=rf"a\.jsonl{message}"):
        opened(config)


def test_text_beside_messages_is_refused(config, tokenizer, tmp_path):
    path = write(tmp_path / "m.jsonl", [MESSAGES | {"prompt": "x"}])
    with pytest.raises(data.DataError, match=r"m\.jsonl:1: 'prompt' is no list .* all of them"):
        opened(dataclasses.replace(config, path=(path,), tokenizer=tokenizer))


def test_amounts_and_files_that_do_not_do(config, tmp_path):
    (tmp_path / "a.txt").write_text("text")
    for name, (value, message) in {
        "path": ((tmp_path / "a.txt",), r"a\.txt has no preferences"),
        "batch_size": (400, r"\d+ preferences, fewer than the 200 of a step; .*--data\.batch-size"),
        "sequence_length": (2, r": 0 preferences, fewer"),
        "held_out_fraction": (0.0, r"no preferences are held out; .*--eval-every 0"),
    }.items():
        with pytest.raises(data.DataError, match=message):
            opened(dataclasses.replace(config, **{name: value}))


def test_other_objectives_name_the_one_for_preferences(config):
    with pytest.raises(data.DataError, match=r"no field 'text'.* --objective dpo"):
        data.open_files(config, vocab_size=320, evaluates=False)


def test_reading_goes_on_after_a_kill(config, monkeypatch):
    """The pairs of an entry stay pairs wherever the process ends."""
    undisturbed = all_rows(opened(config)[0])
    interrupted = dataclasses.replace(config, cache_dir=config.path[0].parent / "other")
    monkeypatch.setattr(cache, "_BATCH_DOCUMENTS", 7)
    monkeypatch.setattr(cache, "_COMMIT_SECONDS", 0.0)
    write_batch, calls = cache._Writing._write, itertools.count()

    def fail_at_the_third(self, *args):
        if next(calls) == 2:
            raise KeyboardInterrupt
        write_batch(self, *args)

    monkeypatch.setattr(cache._Writing, "_write", fail_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        opened(interrupted)
    assert all_rows(opened(interrupted)[0]) == undisturbed
