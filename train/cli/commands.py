"""`python -m train export`, `eval` and `sample`: the commands for a trained model.

The model is a run, one of its checkpoints (`run/checkpoints/120`), or a Hugging Face folder.
"""

import argparse
import dataclasses
import math
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from models.llama_hf import save_pretrained
from models.sharding import make_mesh
from train import data
from train.checkpoints.saved import Saved, find_model
from train.cli.command_line import Parser, file_or_folder, not_empty, number
from train.config import DataConfig, OptimizerConfig, TrainConfig
from train.errors import FolderError, naming
from train.evaluate import Sums, measure
from train.flag_errors import FlagError
from train.formats import number_of
from train.hf_folder import check_finite, copy_tokenizer
from train.outputs import continued
from train.ranges import COUNT, NOT_NEGATIVE, SEED, SIZE
from train.setup import check_dtype
from train.step import make_eval_step, model_graph
from train.token_ids import contradiction, with_tokenizer_ids

_SOURCE = "a run, one of its checkpoints (run/checkpoints/120), or a Hugging Face folder"


def export(arguments: Sequence[str]) -> None:
    """Writes a model with its tokenizer as a Hugging Face folder."""
    parser = _parser("export", "Writes a model with its tokenizer as a Hugging Face folder.")
    parser.add_argument(
        "output", type=file_or_folder, help="folder to write; it must not have a model"
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="dtype of the tensors; default: that of the source, or float32 if it has several",
    )
    flags = parser.parse_args(arguments)
    saved = _find(flags)
    if (flags.output / "config.json").exists():
        raise FolderError(f"{flags.output} has a config.json; name a folder without a model")
    mesh = _mesh(flags)
    if saved.step is not None:  # trained here, so that its tokenizer can be read
        _tell_of_contradiction(saved)
    bos_token, eos_token = saved.bos_token, saved.eos_token
    with naming(flags.output):
        # Before the model is written, because this may refuse a link.
        copy_tokenizer(saved.tokenizer, flags.output, bos_token=bos_token, eos_token=eos_token)
    with jax.set_mesh(mesh):
        params = _finite(saved, mesh)
        config = saved.model
        if flags.dtype:
            config = dataclasses.replace(config, param_dtype=flags.dtype)
            params = jax.tree.map(lambda a: a.astype(flags.dtype), params)
        with naming(flags.output):
            save_pretrained(nnx.merge(model_graph(config), params), flags.output)
    print(f"{saved.name}: written to {flags.output}")
    if saved.tokenizer is None:
        print("its tokens are bytes: there is no tokenizer to write")


def evaluate(arguments: Sequence[str]) -> None:
    """Prints nats per token, accuracy and bits per byte of each file, and of all together."""
    parser = _parser("eval", "Measures how well a model predicts text.")
    parser.add_argument(
        "--path",
        type=file_or_folder,
        nargs="+",
        required=True,
        help="files and folders, as in --data.path of training",
    )
    parser.add_argument(
        "--sequence-length",
        type=number(int, SIZE),
        help="number of tokens in a row; default: as trained, or at most 2048 if that is not known",
    )
    parser.add_argument(
        "--batch-size", type=number(int, SIZE), help="number of rows at a time; default: 8 a device"
    )
    parser.add_argument(
        "--batches",
        type=number(int, SIZE),
        help="number of batches from each file, evenly spread; default: all",
    )
    parser.add_argument(
        "--text-field",
        type=not_empty,
        default="text",
        help="field of the text in .jsonl and .parquet; default: text",
    )
    parser.add_argument(
        "--token-dtype",
        choices=("uint16", "uint32"),
        default="uint16",
        help="dtype of the token ids in .bin; default: uint16",
    )
    parser.add_argument("--cache-dir", type=file_or_folder, help="folder for the tokens")
    _add_tokenizer_flags(parser)
    flags = parser.parse_args(arguments)
    saved = _with_tokenizer(_find_to_compute(flags), flags)
    config = _eval_config(saved, flags)
    mesh = _mesh(flags)
    with jax.set_mesh(mesh):
        if config.data.batch_size % mesh.size:
            raise FlagError(
                f"--batch-size {config.data.batch_size} must be a multiple of the {mesh.size} "
                "devices; give another size"
            )
        data.check_effects(config.data)
        texts = [_open(config, path) for path in flags.path]
        params = _finite(saved, mesh)
        eval_step = jax.jit(make_eval_step(config))
        print(saved.name)
        total = Sums()
        for path, text in zip(flags.path, texts, strict=True):
            if not flags.batches and (rest := text.num_unread_tokens):
                print(
                    f"{path}: its end, {number_of(rest, 'token')}, fills no row of "
                    f"{text.sequence_length} and is not measured; --sequence-length makes shorter "
                    "rows"
                )
            batches = text.eval_batches(config.data.batch_size, flags.batches)
            sums = measure(eval_step, params, batches, text.token_bytes, mesh)
            if not math.isfinite(sums.nll):
                raise FolderError(
                    f"{path}: the loss of {saved.name} is {sums.nll}, which is not finite; take "
                    "another model or an earlier checkpoint"
                )
            _print_sums(str(path), sums)
            total += sums
        if len(texts) > 1:
            _print_sums("all", total)


def _print_sums(name: str, sums: Sums) -> None:
    if not sums.bytes:
        print(f"{name}: no text to predict; its rows hold prompts or ends of documents alone")
        return
    print(
        f"{name}: {sums.loss:.4f} nats per token, accuracy {sums.accuracy:.4f}, "
        f"{sums.bits_per_byte:.4f} bits per byte ({number_of(sums.tokens, 'token')}, "
        f"{number_of(sums.bytes, 'byte')})"
    )


def _eval_config(saved: Saved, flags: argparse.Namespace) -> TrainConfig:
    length = flags.sequence_length or saved.sequence_length
    length = length or min(2048, saved.model.max_position_embeddings)
    if not saved.model.fits(length):
        raise FlagError(
            f"--sequence-length {length} exceeds the {saved.model.max_position_embeddings} "
            "positions of the model; choose a smaller one"
        )
    return TrainConfig(
        name="eval",
        model=saved.model,
        data=DataConfig(
            source="stdlib",
            path=tuple(flags.path),
            tokenizer=saved.tokenizer,
            bos_token=saved.bos_token,
            eos_token=saved.eos_token,
            text_field=flags.text_field,
            token_dtype=flags.token_dtype,
            held_out_fraction=0.0,
            cache_dir=flags.cache_dir,
            sequence_length=length,
            batch_size=8 * jax.device_count() if flags.batch_size is None else flags.batch_size,
        ),
        optimizer=OptimizerConfig(warmup_steps=0),
        steps=1,
        eval_every=0,
        sample_tokens=0,
        save=False,
    )


def _open(config: TrainConfig, path: Path) -> data.PackedDataset:
    """The dataset of all documents of a file or folder.

    `batch_size` is 1, because `open_files` refuses text with fewer rows than a step has.
    """
    alone = dataclasses.replace(config.data, path=(path,), batch_size=1)
    text = data.open_files(alone, vocab_size=config.model.vocab_size, evaluates=False)[0]
    assert isinstance(text, data.PackedDataset)  # several paths would be a mixture
    data.tell_of_cut_records((path,), text, "--sequence-length")
    return text


def sample(arguments: Sequence[str]) -> None:
    """Prints a prompt and the text that the model continues it with."""
    parser = _parser("sample", "Generates text.")
    parser.add_argument("--prompt", required=True, help="beginning of the text")
    parser.add_argument(
        "--max-new-tokens",
        type=number(int, SIZE),
        default=200,
        help="number of tokens to generate; default: 200",
    )
    parser.add_argument(
        "--temperature",
        type=number(float, NOT_NEGATIVE),
        default=0.8,
        help="0 takes the likeliest token; default: 0.8",
    )
    parser.add_argument(
        "--top-k",
        type=number(int, SIZE),
        help="number of likeliest tokens to draw from; default: all",
    )
    parser.add_argument(
        "--seed", type=number(int, SEED), default=0, help="seed of the draw; default: 0"
    )
    _add_tokenizer_flags(parser)
    flags = parser.parse_args(arguments)
    try:
        flags.prompt.encode()
    except UnicodeEncodeError:
        raise FlagError("--prompt is not UTF-8; give it in this encoding") from None
    saved = _with_tokenizer(_find_to_compute(flags), flags)
    tokenizer = _tokenizer_of(saved)
    _tell_of_contradiction(saved)
    if not len(data.start_of_document(flags.prompt, tokenizer)):
        raise FlagError("the prompt has no tokens; give some text with --prompt")
    mesh = _mesh(flags)
    with jax.set_mesh(mesh):
        text = continued(
            flags.prompt,
            tokenizer,
            saved.model,
            _finite(saved, mesh),
            seed=flags.seed,
            max_new_tokens=flags.max_new_tokens,
            temperature=flags.temperature,
            top_k=flags.top_k,
        )
    print(text)


def _tokenizer_of(saved: Saved) -> data.Tokenizer:
    tokenizer = data.BYTES
    if saved.tokenizer is not None:
        tokenizer = data.HuggingFaceTokenizer(
            saved.tokenizer, bos_token=saved.bos_token, eos_token=saved.eos_token
        )
    if tokenizer.vocab_size > saved.model.vocab_size:
        raise FolderError(
            f"{saved.tokenizer or 'the byte vocabulary'} has {tokenizer.vocab_size} tokens, more "
            f"than the {saved.model.vocab_size} of the model; name another with --tokenizer"
        )
    return tokenizer


def _with_tokenizer(saved: Saved, flags: argparse.Namespace) -> Saved:
    """The model with the tokenizer that the flags name, if they name one."""
    given = {
        name: value
        for name in ("tokenizer", "bos_token", "eos_token")
        if (value := getattr(flags, name)) is not None
    }
    saved = dataclasses.replace(saved, **given)
    if saved.tokenizer is None and given:
        name, token = next(iter(given.items()))
        raise FlagError(
            f"--{name.replace('_', '-')} {token!r} is for a tokenizer, and {saved.name} has none, "
            "so that a token is a byte; name one with --tokenizer, or leave the flag out"
        )
    tokenizer = _tokenizer_of(saved)
    if given:
        saved = dataclasses.replace(saved, model=with_tokenizer_ids(saved.model, tokenizer))
    if saved.tokenizer is None and saved.step is None:
        print(f"{saved.name} has no tokenizer: a token is a byte", file=sys.stderr)
    return saved


def _tell_of_contradiction(saved: Saved) -> None:
    if text := contradiction(saved.model, _tokenizer_of(saved)):
        file = saved.folder if saved.step is None else saved.folder.parent
        print(f"{saved.name}: {text}; correct them in {file / 'config.json'}", file=sys.stderr)


def _parser(command: str, description: str) -> argparse.ArgumentParser:
    parser = Parser(command, description)
    parser.add_argument("source", type=file_or_folder, help=_SOURCE)
    parser.add_argument(
        "--step",
        type=number(int, COUNT),
        help="step of the run's checkpoint; default: the newest",
    )
    parser.add_argument(
        "--best",
        action="store_true",
        help="take the run's checkpoint with the lowest held-out loss",
    )
    parser.add_argument(
        "--fsdp",
        type=number(int, SIZE),
        default=1,
        help="number of devices that share the parameters; default: 1",
    )
    return parser


def _add_tokenizer_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tokenizer", type=file_or_folder, help="tokenizer to use in place of the model's own"
    )
    parser.add_argument(
        "--bos-token", help="token that begins a text, in place of the tokenizer's own"
    )
    parser.add_argument(
        "--eos-token", help="token that ends a text, in place of the tokenizer's own"
    )


def _find(flags: argparse.Namespace) -> Saved:
    return find_model(flags.source, step=flags.step, best=flags.best)


def _find_to_compute(flags: argparse.Namespace) -> Saved:
    """The model, after a check that the devices compute in its dtype."""
    saved = _find(flags)
    remedy = "take a GPU, or `export` the model and name the exported folder, which runs in float32"
    check_dtype(saved.model, f"{saved.name}: dtype", remedy)
    return saved


def _finite(saved: Saved, mesh: Mesh) -> nnx.State:
    """The parameters, after a check that all are finite."""
    params = saved.load(mesh)
    of_run = "" if saved.step is None else ", or an earlier checkpoint with --step"
    check_finite(saved.name, params, f"take another model{of_run}")
    return params


def _mesh(flags: argparse.Namespace) -> Mesh:
    num_devices = jax.device_count()
    if num_devices % flags.fsdp:
        raise FlagError(
            f"--fsdp {flags.fsdp} does not divide the {num_devices} devices; choose a divisor"
        )
    return make_mesh(data=num_devices // flags.fsdp, fsdp=flags.fsdp)
