"""Texts that go on after another text: completions, later pieces of a file, and samples."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from support import tiny_run
from support.tokenizer_files import write_byte_level, write_sentence_piece
from train.data import BYTES, HuggingFaceTokenizer, decode_after, open_files
from train.data.cache import tokenized
from train.data.files import Reader
from train.setup import open_datasets


@pytest.fixture(params=["normalizer", "pre-tokenizer", "byte level"])
def tokenizer(request, tmp_path):
    """Tokenizers that put a space in front of a text, in the three ways that there are."""
    file = tmp_path / "tokenizer.json"
    if request.param == "byte level":
        content = json.loads(write_byte_level(file).read_text())
        content["pre_tokenizer"]["add_prefix_space"] = True
    else:
        content = json.loads(write_sentence_piece(file).read_text())
    if request.param == "pre-tokenizer":
        space = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
        content |= {"normalizer": None, "pre_tokenizer": space, "decoder": space}
    file.write_text(json.dumps(content))
    return HuggingFaceTokenizer(file)


@pytest.mark.parametrize(("before", "text"), [("the", "he"), ("the", " he"), ("a. ", "t")])
def test_they_get_no_space_in_front(before, text, tokenizer):
    (prompt,), (other,) = (
        tokenizer.encode([before.encode()]),
        tokenizer.encode_after([text.encode()]),
    )
    whole = tokenizer.decode([*prompt, *other])
    assert whole.removeprefix(" ") == before + text  # byte-level decoders keep the first space
    assert decode_after([tokenizer.bos, *prompt], other, tokenizer) == text


def test_the_cache_has_their_tokens(tokenizer, tmp_path):
    records = [{"prompt": "the", "completion": "he"}, {"prompt": "", "completion": "he"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "long.txt").write_text("one two")

    def stream_of(name):
        reader = Reader(
            files=(tmp_path / name,),
            text_field="text",
            token_dtype="uint16",
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.eos,
            piece_bytes=5,  # "one " and "two"
        )
        cache = tmp_path / "cache"
        entry = tokenized(reader, tokenizer, held_out_fraction=0.0, cache_dir=cache, name=name)
        return entry.stream("train")

    pairs = stream_of("pairs.jsonl")
    texts = [tokenizer.decode(tokens) for tokens in np.split(pairs.tokens, pairs.offsets[1:])]
    assert [text.removeprefix(" ") for text in texts] == ["thehe", "he"]
    assert tokenizer.decode(stream_of("long.txt").tokens).removeprefix(" ") == "one two"


def test_the_place_where_a_prompt_ends_is_a_part_of_the_identity(tmp_path):
    """Without it a run would resume with other labels. All are held out, or none is."""
    records = [
        {"text": "abc"},
        {"prompt": "a", "completion": "bc"},
        {"prompt": "ab", "completion": "c"},
    ]
    identities = []
    for number, record in enumerate(records):
        path = tmp_path / f"{number}.jsonl"
        path.write_text(json.dumps(record))
        reader = Reader(
            files=(path,), text_field="text", token_dtype="uint16", vocab_size=258, end_of_text=257
        )
        options: Any = {"cache_dir": tmp_path / "cache", "name": path.name}
        identities.append(tokenized(reader, BYTES, held_out_fraction=0.5, **options).identity())
    sides = [identity["train"]["documents"] for identity in identities]
    assert sides in ([0, 0, 0], [1, 1, 1])
    assert len({identity["content_hash"] for identity in identities}) == 3


def test_a_text_field_that_no_record_has_is_told(tmp_path, capsys):
    """A record with a prompt needs none. The second time the text is in the cache."""
    records = [{"prompt": f"p{i}", "completion": "c" * 9} for i in range(30)]
    paths = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for path, more in zip(paths, ([], [{"body": "a text"}]), strict=True):
        path.write_text("".join(json.dumps(record) + "\n" for record in records + more))
    (tmp_path / "c.md").write_text("a text without records " * 9)
    of_text = dataclasses.replace(
        tiny_run.ON_LIBRARY.data,
        path=(*paths, tmp_path / "c.md"),
        text_field="body",
        held_out_fraction=0.0,
        cache_dir=tmp_path / "cache",
    )
    for _ in range(2):
        open_files(of_text, vocab_size=258, evaluates=False)
        lines = [line for line in capsys.readouterr().out.splitlines() if "text-field" in line]
        start = f"{paths[0]}: --data.text-field body has no effect, because no record has this "
        assert len(lines) == 1 and lines[0].startswith(start)


def test_the_first_space_of_a_sample_stays(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_sentence_piece(tmp_path / "tokenizer.json"))
    ids = tokenizer.vocabulary
    prompt = [tokenizer.bos, ids["▁t"], ids["he"]]
    assert decode_after(prompt, [ids["▁t"], ids["he"]], tokenizer) == " the"
    assert decode_after([tokenizer.bos], [ids["▁t"]], tokenizer) == "t"


def test_a_line_tells_how_many_records_are_cut(tmp_path, capsys):
    """A record has 16 tokens or 40, with the first and the last one, in rows of 32."""
    for name, sizes in {"a": [14, 14] * 5, "b": [14, 38] * 5, "c": [14, 14, 14]}.items():
        records = [{"prompt": "p", "completion": "x" * (size - 1)} for size in sizes]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    of_text = dataclasses.replace(
        tiny_run.ON_LIBRARY.data,
        path=(tmp_path / "a.jsonl", tmp_path / "b.jsonl"),
        held_out_path=(tmp_path / "c.jsonl",),
        cache_dir=tmp_path / "cache",
        sequence_length=32,
        batch_size=2,
    )
    config = dataclasses.replace(tiny_run.ON_LIBRARY, data=of_text, eval_every=1)
    told = lambda: [line for line in capsys.readouterr().out.splitlines() if " cut " in line]
    open_datasets(config)
    (line,) = told()  # in a and c every record is within a row
    start = f"{tmp_path}/b.jsonl: 6 of 10 records (60.0%) are cut at the end of a row, 5 of them "
    assert line.startswith(start + "because they have more than 33 tokens; ")
    assert line.endswith("a longer --data.sequence-length cuts fewer")
    longer = dataclasses.replace(of_text, sequence_length=24)
    open_datasets(dataclasses.replace(config, data=longer))
    assert [line.partition(" of ")[0] for line in told()] == [
        f"{tmp_path}/a.jsonl: 3",
        f"{tmp_path}/b.jsonl: 6",
        f"{tmp_path}/c.jsonl, held out: 1",
    ]
