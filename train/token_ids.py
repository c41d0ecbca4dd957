"""The tokens that begin and end a text: the model's, and the tokenizer's."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from models.config import LlamaConfig
from train import data
from train.config import TrainConfig
from train.flag_errors import flags_in

_FIELDS = ("bos_token_id", "eos_token_id")


def with_tokenizer_ids(model: LlamaConfig, tokenizer: data.Tokenizer) -> LlamaConfig:
    """The model with the tokenizer's `bos_token_id` and `eos_token_id`.

    Several tokens that end a text stay if the tokenizer's is one of them.
    """
    eos = model.eos_token_id if _ends(model, tokenizer) else tokenizer.eos
    return dataclasses.replace(model, bos_token_id=tokenizer.bos, eos_token_id=eos)


def contradiction(model: LlamaConfig, tokenizer: data.Tokenizer) -> str | None:
    """A sentence on tokens of the model that are not the tokenizer's; None if all are."""
    wrong = []
    if tokenizer.bos is not None and model.bos_token_id != tokenizer.bos:
        wrong.append(f"bos_token_id={model.bos_token_id}, and the tokenizer's is {tokenizer.bos}")
    if not _ends(model, tokenizer):
        wrong.append(f"eos_token_id={model.eos_token_id}, and the tokenizer's is {tokenizer.eos}")
    if not wrong:
        return None
    return f"the model has {'; '.join(wrong)}. Samples and config.json have the model's"


def with_ids_of_text(config: TrainConfig, arguments: Sequence[str]) -> TrainConfig:
    """The configuration whose model has the ids of the tokenizer, unless something names others.

    A model of `init_from` keeps its own, and a flag in `arguments` keeps the value that it gives.
    One line tells of a change.

    Raises:
      DataError: The tokenizer cannot be read.
    """
    if config.init_from or not config.data.is_packed:
        return config
    flags = flags_in(arguments)
    tokenizer = data.load_tokenizer(config.data)
    found = with_tokenizer_ids(config.model, tokenizer)
    changes = {
        name: getattr(found, name)
        for name in _FIELDS
        if f"--model.{name.replace('_', '-')}" not in flags
        and getattr(found, name) != getattr(config.model, name)
    }
    if not changes:
        return config
    for name, value in changes.items():
        print(
            f"the model takes {name} {value} from {config.data.tokenizer or 'bytes'}, in place of "
            f"{getattr(config.model, name)}"
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **changes))


def tell_of_contradiction(config: TrainConfig, tokenizer: data.Tokenizer) -> None:
    """Prints a line if the model's tokens are not the tokenizer's, unless it reads no text."""
    if config.data.is_packed and (text := contradiction(config.model, tokenizer)):
        print(
            f"{config.data.tokenizer or 'bytes'}: {text}; --model.bos-token-id and "
            "--model.eos-token-id set them"
        )


def before_end(tokens: Int[np.ndarray, " S"], model: LlamaConfig) -> Int[np.ndarray, " _"]:
    """The generated tokens before the first that ends the text.

    `generate` fills a row up after that token. A tokenizer leaves the tokens there out of the text
    only if it has them as special tokens.
    """
    ends = np.flatnonzero(np.isin(tokens, [] if model.eos_token_id is None else model.eos_token_id))
    return tokens[: ends[0]] if len(ends) else tokens


def _ends(model: LlamaConfig, tokenizer: data.Tokenizer) -> bool:
    eos = model.eos_token_id
    return tokenizer.eos in (eos if isinstance(eos, tuple) else (eos,))
