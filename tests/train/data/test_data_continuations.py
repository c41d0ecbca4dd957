"""Texts that go on after another text: completions, later pieces of a file, and samples."""

import json

import numpy as np
import pytest

from support.tokenizer_files import write_byte_level, write_sentence_piece
from train.data import HuggingFaceTokenizer, decode_after, files
from train.data.cache import tokenized
from train.data.files import Reader


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


def test_the_cache_has_their_tokens(tokenizer, tmp_path, monkeypatch):
    records = [{"prompt": "the", "completion": "he"}, {"prompt": "", "completion": "he"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "long.txt").write_text("one two")
    monkeypatch.setattr(files, "_PIECE_BYTES", 5)  # "one " and "two"

    def stream_of(name):
        reader = Reader(
            files=(tmp_path / name,),
            text_field="text",
            token_dtype="uint16",
            vocab_size=tokenizer.vocab_size,
            end_of_text=tokenizer.eos,
        )
        cache = tmp_path / "cache"
        entry = tokenized(reader, tokenizer, held_out_fraction=0.0, cache_dir=cache, name=name)
        return entry.stream("train")

    pairs = stream_of("pairs.jsonl")
    texts = [tokenizer.decode(tokens) for tokens in np.split(pairs.tokens, pairs.offsets[1:])]
    assert [text.removeprefix(" ") for text in texts] == ["thehe", "he"]
    assert tokenizer.decode(stream_of("long.txt").tokens).removeprefix(" ") == "one two"


def test_the_first_space_of_a_sample_stays(tmp_path):
    tokenizer = HuggingFaceTokenizer(write_sentence_piece(tmp_path / "tokenizer.json"))
    ids = tokenizer.vocabulary
    prompt = [tokenizer.bos, ids["▁t"], ids["he"]]
    assert decode_after(prompt, [ids["▁t"], ids["he"]], tokenizer) == " the"
    assert decode_after([tokenizer.bos], [ids["▁t"]], tokenizer) == "t"
