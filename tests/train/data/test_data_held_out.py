"""How much of a text is held out, and what a run says of it."""

import json
import re

import pytest

from train import data
from train.config import DataConfig


def config_of(path, **changes):
    sizes = {"sequence_length": 16, "batch_size": 2}
    return DataConfig(
        source="stdlib", path=(path,), cache_dir=path.parent / "cache", **sizes, **changes
    )


@pytest.mark.parametrize(
    ("num_lines", "size", "lowest", "highest"),
    [
        (4000, 8, 0.05, 0.07),  # 84 KiB, of which pieces of 16 KiB hold out 44%
        (350, 1, 0.13, 0.15),  # pieces of 4 KiB hold out 44%, those of 2 KiB none
        (250, 4, 0.19, 0.21),  # larger pieces are all held out, and none of the smaller ones
    ],
)
def test_a_small_text_holds_out_at_most_twice_the_share(
    num_lines, size, lowest, highest, tmp_path, capsys
):
    """If no size of pieces does, it is the one that comes nearest to the share."""
    book = tmp_path / "book.txt"
    book.write_bytes(b"".join(b"line %d of the book\n" % line for line in range(num_lines)))
    config = config_of(book)
    _, _, fingerprint = data.open_files(config, vocab_size=258, evaluates=True)
    train, held_out = (fingerprint["path"][0][split]["tokens"] for split in ("train", "held_out"))
    share = held_out / (train + held_out)
    assert lowest < share < highest
    printed = capsys.readouterr().out
    assert f"{book}: read in pieces of {size} KiB, because larger ones hold out all" in printed
    amount = rf", and {held_out:,} tokens \({share:.1%}\) in [\d,]+ documents? held out;"
    assert re.search(amount, printed)


@pytest.mark.parametrize(
    ("fraction", "evaluates"), [(0.2, False), (0.2, True), (0.0, False), (1e-6, False)]
)
def test_text_that_is_held_out_in_vain_is_told(fraction, evaluates, tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {i}"}) + "\n" for i in range(100)))
    config = config_of(path, held_out_fraction=fraction)
    _, _, fingerprint = data.open_files(config, vocab_size=258, evaluates=evaluates)
    number = fingerprint["path"][0]["held_out"]["tokens"]
    assert bool(number) == (fraction == 0.2)
    line = (
        f"{path}: no evaluation reads the {number:,} held-out tokens, because of --eval-every 0; "
    )
    line += "--data.held-out-fraction 0 trains on them, too\n"
    printed = capsys.readouterr().out
    assert (line in printed) == ("no evaluation" in printed) == (number > 0 and not evaluates)
