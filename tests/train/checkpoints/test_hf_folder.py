"""Hugging Face folders that are damaged or incomplete, and links in them."""

import dataclasses
import json
import os
import shutil
from pathlib import Path

import pytest

from models.presets import PRESETS
from train.hf_folder import (
    FolderError,
    check_model,
    copy_tokenizer,
    has_tokenizer,
    is_hf_folder,
    read_model_config,
)

GQA = Path(__file__).parents[2] / "golden" / "gqa"
LIKE = dataclasses.replace(PRESETS["demo"], remat="none")


@pytest.fixture
def folder(tmp_path):
    """A model with a tokenizer of four files."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(GQA / name, folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"a": 1}')
    (folder / "special_tokens_map.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("template")
    return folder


def change_config(folder: Path, **changes) -> None:
    content = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, but its files have 21 tenso"),
        ({"vocab_size": 10**9}, r"embed_tokens\.weight in .* expected \(1000000000, 32\)"),
        ({"hidden_size": "32"}, r"config\.json: hidden_size='32' must be a whole number"),
        ({"rope_theta": {}, "rope_parameters": None}, r"config\.json: rope_theta={} must be a num"),
        ({"attention_dropout": 0.1}, r"config\.json: .*attention_dropout=0\.1 is not implemented"),
    ],
)
def test_models_are_refused_when_they_are_named(changes, message, folder, unchecked_shapes):
    """The error has one line and comes before an array of that size is made."""
    change_config(folder, **changes)
    with pytest.raises(FolderError, match=message) as caught:
        read_model_config(folder, LIKE)
    assert "\n" not in str(caught.value)


def test_a_model_without_weights_has_a_configuration(folder):
    model = read_model_config(folder, LIKE)
    check_model(folder, model)
    (folder / "model.safetensors").unlink()
    assert read_model_config(folder, LIKE) == model
    (folder / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(FolderError, match=r"index\.json is not an index of tensors: .*; download"):
        read_model_config(folder, LIKE)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "large"])
def test_a_file_that_never_ends_is_not_read(kind, name, folder):
    file = folder / name
    file.unlink()
    match kind:
        case "pipe":
            os.mkfifo(file)
        case "device":
            file.symlink_to("/dev/zero")
        case "folder":
            file.mkdir()
        case "large":
            with open(file, "wb") as stream:
                stream.truncate(2**40)
    message = r"1,099,511,627,776 bytes" if kind == "large" else f"not a regular file but a {kind}"
    look = is_hf_folder if name == "config.json" else has_tokenizer
    with pytest.raises(FolderError, match=rf"{name} .*{message}"):
        look(folder)
    if name == "config.json":
        with pytest.raises(FolderError, match=rf"{name} .*{message}"):
            read_model_config(folder, LIKE)


def test_folders_of_other_things(tmp_path):
    assert not is_hf_folder(tmp_path / "nowhere") and not has_tokenizer(tmp_path / "nowhere")
    file = tmp_path / "config.json"
    for content in ("{", "[]", '{"config": {}}'):
        file.write_text(content)
        assert not is_hf_folder(tmp_path)
    assert not is_hf_folder(file) and not has_tokenizer(file)


NAMES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
NAMES += ("chat_template.jinja",)


@pytest.mark.parametrize("name", NAMES)
def test_a_link_that_leaves_the_folder_is_not_copied(name, folder, tmp_path):
    (tmp_path / "secret").write_text('"secret"')
    (folder / name).unlink()
    (folder / name).symlink_to("../secret")
    with pytest.raises(FolderError, match=f"{name} is a link that leaves its folder, to .*secret"):
        copy_tokenizer(folder, tmp_path / "export")
    assert not (tmp_path / "export").exists()
    if name != "tokenizer.json":
        with pytest.raises(FolderError, match="leaves its folder"):
            copy_tokenizer(folder / "tokenizer.json", tmp_path / "export")


@pytest.mark.parametrize("name", NAMES[1:])
def test_a_pipe_beside_the_tokenizer_is_not_copied(name, folder, tmp_path):
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(FolderError, match=f"{name} is not a regular file but a pipe"):
        copy_tokenizer(folder, tmp_path / "export")


def test_links_inside_the_folder_and_a_tokenizer_that_was_named_are_copied(folder, tmp_path):
    (folder / "chat_template.jinja").rename(folder / "template")
    (folder / "chat_template.jinja").symlink_to("template")
    copy_tokenizer(folder, tmp_path / "export")
    copied = {path.name: path.read_text() for path in (tmp_path / "export").iterdir()}
    assert sorted(copied) == sorted(NAMES) and copied["chat_template.jinja"] == "template"
    assert not any(path.is_symlink() for path in (tmp_path / "export").iterdir())
    (tmp_path / "mine.json").symlink_to(folder / "tokenizer.json")
    copy_tokenizer(tmp_path / "mine.json", tmp_path / "second")
    assert [path.name for path in (tmp_path / "second").iterdir()] == ["tokenizer.json"]


def test_a_copy_does_not_write_through_links(folder, tmp_path):
    (tmp_path / "outside").write_text("mine")
    (tmp_path / "export").mkdir()
    for name in NAMES:
        (tmp_path / "export" / name).symlink_to(tmp_path / "outside")
    copy_tokenizer(folder, tmp_path / "export", eos_token="<end>")
    assert (tmp_path / "outside").read_text() == "mine"
    content = json.loads((tmp_path / "export" / "tokenizer_config.json").read_text())
    assert content == {"a": 1, "eos_token": "<end>"}


@pytest.mark.parametrize(
    ("content", "message"), [("[]", "must be a JSON object; repair"), ("{", "is not JSON")]
)
def test_a_damaged_configuration_of_the_tokenizer_is_named(content, message, folder, tmp_path):
    (folder / "tokenizer_config.json").write_text(content)
    with pytest.raises(FolderError, match=rf"tokenizer_config\.json {message}"):
        copy_tokenizer(folder, tmp_path / "export", eos_token="<end>")
