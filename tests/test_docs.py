"""The code in the README and in the pages of `docs/` runs, and what they point to exists."""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import jax
import pytest

from models.llama_hf import config_to_hf
from models.presets import PRESETS
from support.pages import README, ROOT, command_lines, name, pages, python_blocks
from support.tokenizer_files import write_byte_level
from train import data
from train.__main__ import main
from train.cli import plan
from train.cli.command_line import COMMANDS, Parser, parse_command_line

PAGES = pages()
every_page = pytest.mark.parametrize("page", PAGES, ids=name)


QUICKSTART = ROOT / "docs/quickstart.md"


# Pages whose code takes 5 core seconds each, of features that have tests of their own.
LONGER = [ROOT / "docs" / page for page in ("frameworks.md", "llama.md", "meshes.md")]


# The next test says that the quickstart has the README's example.
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=name(page), marks=pytest.mark.full if page in LONGER else ())
        for page in PAGES
        if python_blocks(page) and page != README
    ],
)
def test_python_blocks_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "page"}
    blocks = [(page, block) for block in python_blocks(page)]
    if page == QUICKSTART:
        blocks.append((README, python_blocks(README)[-1]))
    # Users promote dtypes; the other tests refuse to.
    with jax.numpy_dtype_promotion("standard"):
        for source, block in blocks:
            exec(compile(block, str(source), "exec"), namespace)


def test_quickstart_explains_the_example_of_the_readme():
    *example, _on_a_mesh = python_blocks(README)
    lines = [line for block in example for line in block.splitlines() if line]
    explained = "".join(python_blocks(QUICKSTART)).splitlines()
    assert lines == [line for line in explained if line][: len(lines)]


def test_readme_has_at_most_180_lines():
    assert len(README.read_text().splitlines()) <= 180


@every_page
def test_links_lead_to_files(page):
    for link in re.findall(r"\]\((?!https?:|mailto:|#)([^)#\s]+)", page.read_text()):
        assert (page.parent / link).exists(), link


@every_page
def test_lines_have_at_most_100_characters(page):
    """The limit is not for tables, targets of links, and code, which may be a program's output."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in re.sub(r"\]\([^)]*\)", "]", text).splitlines():
        assert len(line) <= 100 or line.startswith("|"), line


@every_page
def test_commands_name_what_exists(page):
    makefile = (ROOT / "Makefile").read_text()
    for line in command_lines(page):
        for target in re.findall(r"\bmake ([\w-]+)", line):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), line
        for module in re.findall(r"\bpython -m ((?:benchmarks|tests|train|models)[\w.]*)", line):
            assert importlib.util.find_spec(module) is not None, line


def arguments_of(line: str) -> list[str] | None:
    """The arguments of `python -m train` in a line, or None if it calls something else."""
    if found := re.search(r'\bmake (train|plan) ARGS="(.*)"', line):
        return [*(["plan"] if found[1] == "plan" else []), *shlex.split(found[2])]
    if found := re.search(r"\bpython -m train( .*|$)", line):
        return shlex.split(found[1])
    return None


def parsed_commands(*, trains: bool) -> list[Any]:
    """The calls of `python -m train` in all pages: those that train, or those of other commands."""
    found = {}
    for page in PAGES:
        for line in command_lines(page):
            arguments = arguments_of(line)
            if arguments is None or "--help" in arguments:
                continue
            if trains == (not arguments or arguments[0] not in COMMANDS):
                found[f"{name(page)}: {shlex.join(arguments)}"] = arguments
    return [pytest.param(arguments, id=line) for line, arguments in found.items()]


@pytest.fixture(scope="module")
def files_of_the_pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    write_files_of_the_pages(folder)
    return folder


@pytest.mark.parametrize("arguments", parsed_commands(trains=True))
def test_training_commands_are_understood_and_find_their_data(
    arguments, files_of_the_pages, monkeypatch
):
    monkeypatch.chdir(files_of_the_pages)
    monkeypatch.setenv("XDG_CACHE_HOME", str(files_of_the_pages / "cache"))
    config = parse_command_line(arguments)
    if config.data.path:
        is_preferences = config.objective == "dpo"
        train_data, held_out, _ = (data.open_preferences if is_preferences else data.open_files)(
            config.data, vocab_size=config.model.vocab_size, evaluates=config.eval_every > 0
        )
        assert (held_out is not None) == (config.eval_every > 0)
        rows = train_data.batch(0, batch_size=config.data.rows_per_step, seed=0)["tokens"]
        assert rows.shape == (config.data.rows_per_step, config.data.sequence_length)


def write_files_of_the_pages(folder: Path) -> None:
    """The files that the pages' commands name."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    text = [f"{i}: the quick brown fox jumps over the lazy dog\n" * 5 for i in range(600)]
    lines = "".join(json.dumps({"text": t}) + "\n" for t in text)
    chat = [{"prompt": t, "completion": t * 9} for t in text]
    (folder / "text.jsonl").write_text(lines)
    pairs = [{"prompt": f"{i}", "chosen": "good", "rejected": "bad"} for i in range(400)]
    (folder / "preferences.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    models = ("Llama-3.2-1B", "runs/demo/model")
    for subfolder in ("notes", *models):
        (folder / subfolder).mkdir(parents=True)
    (folder / "notes" / "a.md").write_text("".join(text))
    (folder / "book.txt").write_text("".join(text) * 4)
    (folder / "web.jsonl").write_text(lines)
    (folder / "dev.jsonl").write_text(lines)
    (folder / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record in chat))
    pq.write_table(pa.table({"text": text}), folder / "web.parquet")
    for subfolder in (".", "Llama-3.2-1B"):
        write_byte_level(folder / subfolder / "tokenizer.json")
    hf_config = config_to_hf(PRESETS["demo"])
    for subfolder in models:
        (folder / subfolder / "config.json").write_text(json.dumps(hf_config))


@pytest.mark.parametrize("arguments", parsed_commands(trains=False))
def test_other_commands_are_understood(arguments, tmp_path, monkeypatch):
    """A command gets as far as its run, which does not exist, or a plan."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Parser, "error", lambda self, message: pytest.fail(message))
    command, *arguments = arguments
    if command == "plan":
        flags, rest = plan._parser().parse_known_args(arguments)
        parse_command_line(plan._train_arguments(flags, rest))
        return
    with pytest.raises(SystemExit):
        main([command, *arguments])
