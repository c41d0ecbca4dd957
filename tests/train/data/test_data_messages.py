"""Messages in the place of text, for `--objective sft`. About 3 s."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from support.tokenizer_files import TEMPLATE, write_byte_level, write_config
from train import data
from train.config import DataConfig
from train.data import IGNORED

BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"


def message(role, content):
    return {"role": role, "content": content}


TURNS = [message("user", "hi"), message("assistant", "hello"), message("user", "é?")]
ANSWER = message("assistant", "yes")
PROMPT = f"{BEGIN}[user]hi[assistant]hello{END}[user]é?[assistant]"
RECORDS = {
    "messages": {"messages": [*TURNS, ANSWER]},
    "prompt and completion": {"prompt": TURNS, "completion": [ANSWER]},
}


@pytest.fixture
def config(tmp_path):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    write_byte_level(folder / "tokenizer.json")
    write_config(folder, chat_template=TEMPLATE, bos_token=BEGIN, eos_token=END)
    return DataConfig(
        source="stdlib",
        path=(tmp_path / "chat.jsonl",),
        tokenizer=folder,
        cache_dir=tmp_path / "cache",
        held_out_fraction=0.0,
        sequence_length=20,
        batch_size=1,
    )


def opened(config, records) -> Any:
    config.path[0].write_text("".join(json.dumps(record) + "\n" for record in records))
    return data.open_files(config, vocab_size=320, evaluates=False)[0]


def stream_of(dataset):
    """The tokens that predict another one, and that one if it is learned, else `IGNORED`."""
    batch = dataset.expand(np.arange(dataset.num_rows))
    return batch["tokens"].ravel().tolist(), batch["labels"].ravel().tolist()


@pytest.mark.parametrize("name", RECORDS)
def test_the_last_message_is_learned(name, config):
    tokens, labels = stream_of(opened(config, [RECORDS[name], {"text": "and text " * 20}]))
    encode = data.HuggingFaceTokenizer(config.tokenizer).encode
    prompt, answer = (encode([t.encode()])[0].tolist() for t in (PROMPT, f"yes{END}"))
    # The template alone begins and ends the text.
    whole = prompt + answer
    assert tokens[: len(whole)] == whole
    assert labels[: len(prompt) - 1] == [IGNORED] * (len(prompt) - 1)
    assert labels[len(prompt) - 1 : len(whole) - 1] == answer


def test_parquet(config, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    expected = stream_of(opened(config, [RECORDS["messages"]] * 3))
    pq.write_table(pa.Table.from_pylist([RECORDS["messages"]] * 3), tmp_path / "chat.parquet")
    config = dataclasses.replace(config, path=(tmp_path / "chat.parquet",))
    assert stream_of(data.open_files(config, vocab_size=320, evaluates=False)[0]) == expected


def test_another_template_makes_other_tokens(config):
    before = stream_of(opened(config, [RECORDS["messages"]] * 3))
    (config.tokenizer / "chat_template.jinja").write_text("!" + TEMPLATE)
    assert stream_of(data.open_files(config, vocab_size=320, evaluates=False)[0]) != before


def test_a_template_that_is_not_used_may_be_malformed(config):
    (config.tokenizer / "chat_template.jinja").write_text("{% for")
    assert opened(config, [{"text": "text " * 20}]).num_rows
    with pytest.raises(data.DataError, match=r"chat\.jsonl:1: the chat template .* is malformed"):
        opened(config, [RECORDS["messages"]])


def test_only_records_need_a_template_that_can_be_read(config, tmp_path):
    (config.tokenizer / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(data.DataError, match=r"chat_template\.jinja cannot be read: .*; repair"):
        opened(config, [{"text": "text " * 20}])
    (tmp_path / "a.txt").write_text("text " * 20)
    config = dataclasses.replace(config, path=(tmp_path / "a.txt",))
    tokens, _ = stream_of(data.open_files(config, vocab_size=320, evaluates=False)[0])
    assert tokens


ERRORS = {
    "one message": ({"messages": [ANSWER]}, r"'messages' is .*, not a list of two or more"),
    "no roles": ({"messages": ["hi", "hello"]}, r"'messages' is .*, not a list of two or more"),
    "last of the user": ({"messages": TURNS}, r"the last message is of 'user', .*'assistant'"),
    "a text": ({"prompt": "hi", "completion": [ANSWER]}, r"'prompt' is no list of messages"),
    "no messages": ({"prompt": TURNS, "completion": []}, r"'completion' is an empty list; give"),
    "null": (
        {"messages": [*TURNS, message("assistant", None)]},
        r"'content' .*'assistant' is null",
    ),
    "a number": ({"messages": [message("user", 4), ANSWER]}, r"'content' of .*'user' is 4, not a"),
    "no content": ({"prompt": TURNS, "completion": [{"role": "assistant"}]}, r"'content' .* null"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_malformed_records(name, config):
    record, error = ERRORS[name]
    with pytest.raises(data.DataError, match=rf"chat\.jsonl:2: {error}"):
        opened(config, [RECORDS["messages"], record])


def test_messages_without_a_template(config):
    config = dataclasses.replace(config, tokenizer=None)
    with pytest.raises(data.DataError, match=r"messages need a chat template; .*--data\.tokenizer"):
        opened(config, [RECORDS["messages"]])


# What templates may use

TOOLS = [{"type": "function", "function": {"name": "add"}}]


def learned_text(config, record):
    """The text of a record, which is repeated so that it fills a row."""
    tokens, _ = stream_of(opened(config, [record] * 3))
    return data.HuggingFaceTokenizer(config.tokenizer).decode(tokens)


def with_template(config, template, **values):
    write_config(config.tokenizer, chat_template=template, bos_token=BEGIN, eos_token=END, **values)


@pytest.mark.parametrize("tools", [TOOLS, json.dumps(TOOLS)], ids=["objects", "a text"])
@pytest.mark.parametrize("name", RECORDS)
def test_tools_go_to_the_template(name, tools, config):
    with_template(config, "{% if tools %}{{ tools | tojson }}{% endif %}" + TEMPLATE)
    record = RECORDS[name] | {"tools": tools}
    assert json.dumps(TOOLS) in learned_text(config, record)
    assert "function" not in learned_text(config, RECORDS[name] | {"tools": None})
    # In a preference, too.
    pair = {"prompt": TURNS, "chosen": [ANSWER], "rejected": [ANSWER], "tools": tools}
    config.path[0].write_text(json.dumps(pair) + "\n")
    longer = dataclasses.replace(config, sequence_length=200, batch_size=2)
    dataset: Any = data.open_preferences(longer, vocab_size=320, evaluates=False)[0]
    tokens = dataset.expand(np.arange(2))["tokens"][0]
    decoded = data.HuggingFaceTokenizer(config.tokenizer).decode(tokens.tolist())
    assert json.dumps(TOOLS) in decoded


def test_tools_in_parquet(config, tmp_path):
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    with_template(config, "{{ tools | tojson }}" + TEMPLATE)
    record = RECORDS["messages"] | {"tools": json.dumps(TOOLS)}
    expected = stream_of(opened(config, [record] * 3))
    pq.write_table(pa.Table.from_pylist([record] * 3), tmp_path / "chat.parquet")
    config = dataclasses.replace(config, path=(tmp_path / "chat.parquet",))
    assert stream_of(data.open_files(config, vocab_size=320, evaluates=False)[0]) == expected


@pytest.mark.parametrize("tools", [{"name": "add"}, ["add"], "add", 3])
def test_malformed_tools(tools, config):
    with pytest.raises(data.DataError, match=r"chat\.jsonl:1: 'tools' is .*, not a list of object"):
        opened(config, [RECORDS["messages"] | {"tools": tools}])


def test_all_special_tokens_go_to_the_template(config):
    names = "{{ pad_token }},{{ unk_token }},{{ additional_special_tokens | join(';') }}."
    tokens = {
        "pad_token": {"content": "fox"},
        "unk_token": "dog",
        "additional_special_tokens": ["lazy", {"content": "over"}],
        "add_bos_token": True,
    }
    with_template(config, names + TEMPLATE, **tokens)
    assert learned_text(config, RECORDS["messages"]).startswith("fox,dog,lazy;over.")
    # Other tokens are other text, and the cache must not give the old one.
    with_template(config, names + TEMPLATE, **tokens | {"pad_token": "jumps"})
    dataset = data.open_files(config, vocab_size=320, evaluates=False)[0]
    tokens, _ = stream_of(dataset)
    text = data.HuggingFaceTokenizer(config.tokenizer).decode(tokens)
    assert text.startswith("jumps,dog")


def test_marks_of_answers_change_nothing(config):
    expected = stream_of(opened(config, [RECORDS["messages"]] * 3))
    content = "{{ m['content'] }}"
    marked = f"{{% generation %}}{content}{{% endgeneration %}}"
    assert content in TEMPLATE
    with_template(config, TEMPLATE.replace(content, marked))
    assert stream_of(data.open_files(config, vocab_size=320, evaluates=False)[0]) == expected
