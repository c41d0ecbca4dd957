"""Tokenizers: their encoding, the tokens that begin and end a text, and the count of bytes."""

import json

import numpy as np
import pytest

from support.tokenizer_files import write_byte_level, write_config, write_sentence_piece
from train.data import (
    BOS,
    BYTES,
    EOS,
    DataError,
    HuggingFaceTokenizer,
    Tokenizer,
    start_of_document,
)
from train.data import tokenizer as tokenizer_module

TEXTS = ["", "the fox", "x = 'ö€𝄞'\r\n\r\n", "\0\t\n", "日本語 text", "<|end_of_text", " " * 50]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return write_byte_level(tmp_path_factory.mktemp("byte_level") / "tokenizer.json")


@pytest.fixture(scope="module")
def sentence_piece(tmp_path_factory):
    return write_sentence_piece(tmp_path_factory.mktemp("sentence_piece") / "tokenizer.json")


def num_bytes(tokenizer: Tokenizer, tokens):
    return int(tokenizer.token_bytes[tokens].sum())


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_of_bytes_count_every_byte_once(text, byte_level):
    for tokenizer in (BYTES, HuggingFaceTokenizer(byte_level)):
        (tokens,) = tokenizer.encode([text.encode()])
        assert tokenizer.decode(tokens) == text
        assert num_bytes(tokenizer, tokens) == len(text.encode())
        assert tokenizer.decode([tokenizer.bos, *tokens, tokenizer.eos]) == text


def test_sentence_pieces_count_the_bytes_of_their_text(sentence_piece):
    tokenizer = HuggingFaceTokenizer(sentence_piece)
    assert not tokenizer.tokens_of_bytes
    assert (tokenizer.bos, tokenizer.eos) == (1, 2)
    text = "the café. X日"
    (tokens,) = tokenizer.encode([text.encode()])
    assert tokenizer.decode(tokens) == text
    assert len(tokens) < len(text.encode())
    assert num_bytes(tokenizer, tokens) == 1 + len(text.encode())  # the space in front
    assert tokenizer.token_bytes[[0, 1, 2]].tolist() == [0, 0, 0]


def test_tokens_that_the_file_would_add_are_not_added(byte_level):
    tokenizer = HuggingFaceTokenizer(byte_level)
    (tokens,) = tokenizer.encode([b"the quick brown fox jumps over the lazy dog " * 20])
    assert len(tokens) > 9
    assert tokens.max() < tokenizer.vocab_size == 300
    assert not {tokenizer.bos, tokenizer.eos} & set(tokens.tolist())
    # The text may spell such a token out.
    assert tokenizer.encode([b"<|end_of_text|>"])[0].tolist() == [tokenizer.eos]


def test_a_folder_is_as_good_as_its_file(byte_level):
    assert HuggingFaceTokenizer(byte_level.parent).fingerprint == (
        HuggingFaceTokenizer(byte_level).fingerprint
    )


@pytest.mark.parametrize(
    ("special", "config", "given", "expected"),
    [
        (("<s>", "</s>"), None, {}, ("<s>", "</s>")),
        (("<|endoftext|>",), None, {}, (None, "<|endoftext|>")),
        (("<s>", "</s>", "<e>"), {"bos_token": None, "eos_token": "<e>"}, {}, (None, "<e>")),
        (("<s>", "</s>", "<e>"), {"eos_token": {"content": "<e>"}}, {}, ("<s>", "<e>")),
        (("<s>", "</s>", "<e>"), {"eos_token": "</s>"}, {"eos_token": "<e>"}, ("<s>", "<e>")),
        (("<s>", "</s>"), None, {"bos_token": ""}, (None, "</s>")),
    ],
)
def test_tokens_that_begin_and_end_a_text(special, config, given, expected, tmp_path):
    path = write_byte_level(tmp_path / "tokenizer.json", special=special)
    if config is not None:
        write_config(tmp_path, **config)
    tokenizer = HuggingFaceTokenizer(path, **given)
    ids = {token: index for index, token in enumerate(special)}
    assert (tokenizer.bos, tokenizer.eos) == (ids.get(expected[0]), ids[expected[1]])
    start = start_of_document("the", tokenizer).tolist()
    bos = [] if tokenizer.bos is None else [tokenizer.bos]
    assert start == bos + tokenizer.encode([b"the"])[0].tolist()


def test_fingerprints_differ_where_tokens_do(byte_level, tmp_path):
    other = write_byte_level(tmp_path / "tokenizer.json", vocab_size=290)
    tokenizers = [
        BYTES,
        HuggingFaceTokenizer(byte_level),
        HuggingFaceTokenizer(byte_level, bos_token=""),
        HuggingFaceTokenizer(byte_level, eos_token="t"),
        HuggingFaceTokenizer(other),
    ]
    assert len({tokenizer.fingerprint for tokenizer in tokenizers}) == len(tokenizers)


def test_a_model_may_generate_more_than_the_tokenizer_has(byte_level):
    tokenizer = HuggingFaceTokenizer(byte_level)
    (tokens,) = tokenizer.encode([b"the"])
    assert tokenizer.decode(np.append(tokens, 319)) == "the"
    assert BYTES.decode([BOS, 65, EOS, 319]) == "A"


def test_broken_tokenizers_are_named(byte_level, tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(DataError, match=r"tokenizer\.json cannot be read .*--data\.tokenizer"):
        HuggingFaceTokenizer(tmp_path)
    for content in ("{}", "not JSON", '{"model": 3}'):
        path.write_text(content)
        with pytest.raises(
            DataError, match=r"tokenizer\.json is not a tokenizer\.json of .*; name one"
        ):
            HuggingFaceTokenizer(path)
    path.write_bytes(b"\xff")
    with pytest.raises(DataError, match="is not a tokenizer"):
        HuggingFaceTokenizer(path)
    write_byte_level(path, special=("<begin>",))
    with pytest.raises(DataError, match=r"which token ends a text; .*--data\.eos-token"):
        HuggingFaceTokenizer(path)
    with pytest.raises(DataError, match=r"no token '<end>'; .*--data\.eos-token"):
        HuggingFaceTokenizer(path, eos_token="<end>")
    with pytest.raises(DataError, match=r"--data\.eos-token '' names no token, .*; name one of"):
        HuggingFaceTokenizer(path, eos_token="")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps([1]))
    with pytest.raises(DataError, match=r"tokenizer_config\.json is no JSON object; repair"):
        HuggingFaceTokenizer(path)
    (tmp_path / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(DataError, match=r"tokenizer_config\.json cannot be read: .*recursion"):
        HuggingFaceTokenizer(path)


def test_tokenizers_of_absurd_sizes_are_refused(tmp_path, monkeypatch):
    path = write_byte_level(tmp_path / "tokenizer.json")
    content = json.loads(path.read_text())
    content["model"]["vocab"]["far away"] = 2**32 - 1
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="has a token 4294967295, above the allowed 16777215"):
        HuggingFaceTokenizer(path)
    monkeypatch.setattr(tokenizer_module, "_FILE_BYTES", 1000)
    with pytest.raises(
        DataError, match=r"tokenizer\.json has [\d,]+ bytes, more than the allowed 1,000; put"
    ):
        HuggingFaceTokenizer(path)
