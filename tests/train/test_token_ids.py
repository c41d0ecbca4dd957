"""The tokens that begin and end a text: those of the tokenizer, unless the user names others."""

import argparse
import dataclasses

import numpy as np
import pytest

import train.hf_folder
import train.loop
from support import tiny_run
from support.tokenizer_files import write_byte_level
from train import data
from train.__main__ import main
from train.checkpoints.saved import Saved
from train.cli import commands
from train.hf_folder import check_model
from train.token_ids import before_end, contradiction, tell_of_contradiction, with_tokenizer_ids


@pytest.fixture
def own(tmp_path):
    """A tokenizer with begin 1 and end 0."""
    return write_byte_level(tmp_path / "own.json", special=("</s>", "<s>", "fox"))


@pytest.fixture
def configured(own, tmp_path, monkeypatch, capsys):
    """Runs a command line up to the training loop; returns its configuration and its output."""
    (tmp_path / "text.txt").write_text("the fox")
    flags = ["--data.path", tmp_path / "text.txt", "--data.tokenizer", own]

    def of(*more):
        found = []
        monkeypatch.setattr(train.loop, "run", found.append)
        main([*map(str, flags), *more])
        return found[0], capsys.readouterr().out

    return of


def test_they_come_from_the_tokenizer(configured, own):
    config, said = configured()
    assert (config.model.bos_token_id, config.model.eos_token_id) == (1, 0)
    assert f"the model takes eos_token_id 0 from {own}, in place of 257" in said
    config, said = configured("--data.bos-token", "", "--data.eos-token", "fox")
    assert (config.model.bos_token_id, config.model.eos_token_id) == (None, 2)


def test_flags_name_others_and_the_run_says_so(configured, capsys):
    config, said = configured("--model.eos-token-id", "5")
    assert (config.model.bos_token_id, config.model.eos_token_id) == (1, 5)
    assert "eos_token_id" not in said
    tell_of_contradiction(config, data.load_tokenizer(config.data))
    said = capsys.readouterr().out
    assert "the model has eos_token_id=5, and the tokenizer's is 0" in said
    assert "bos_token_id=" not in said


def test_bytes_have_their_own():
    assert contradiction(tiny_run.MODEL, data.BYTES) is None
    other = dataclasses.replace(tiny_run.MODEL, bos_token_id=1, eos_token_id=(2, 3))
    assert "bos_token_id=1" in str(contradiction(other, data.BYTES))
    assert with_tokenizer_ids(other, data.BYTES) == tiny_run.MODEL
    several = dataclasses.replace(tiny_run.MODEL, eos_token_id=(2, 257))
    assert contradiction(several, data.BYTES) is None
    assert with_tokenizer_ids(several, data.BYTES) == several


@pytest.mark.parametrize("ends, size", [(None, 4), (9, 4), (5, 1), ((9, 7), 2), ((7, 5), 1)])
def test_tokens_before_the_end(ends, size):
    tokens = np.array([3, 5, 7, 7])
    model = dataclasses.replace(tiny_run.MODEL, eos_token_id=ends)
    assert before_end(tokens, model).tolist() == tokens[:size].tolist()


def test_a_folder_allows_other_tokens(monkeypatch, tmp_path):
    monkeypatch.setattr(train.hf_folder, "read_model_config", lambda folder, like: tiny_run.MODEL)
    check_model(tmp_path, dataclasses.replace(tiny_run.MODEL, eos_token_id=7, bos_token_id=None))


def test_samples_end_at_the_token_that_the_flags_name(own, tmp_path):
    model = dataclasses.replace(tiny_run.MODEL, vocab_size=320)
    saved = Saved(name="model", model=model, folder=tmp_path, tokenizer=own)
    flags = argparse.Namespace(tokenizer=None, bos_token=None, eos_token=None)
    assert commands._with_tokenizer(saved, flags).model.eos_token_id == 257
    flags.eos_token = "fox"
    assert commands._with_tokenizer(saved, flags).model.eos_token_id == 2
