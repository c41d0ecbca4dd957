"""Files of Hugging Face checkpoints: the round trip, and folders that are refused."""

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from models.llama import Llama
from models.llama_hf import load_pretrained, save_pretrained
from models.sharding import make_mesh

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = ("gqa", "mha_tied", "head_dim", "biases", "qwen3", "padded_sharded", "bfloat16")

pytestmark = pytest.mark.usefixtures("fast_compilation")


def tensors_in(folder: Path) -> dict[str, np.ndarray]:
    files = sorted(folder.glob("*.safetensors"))
    assert files
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_bits(tensors: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert sorted(tensors) == sorted(expected)
    for name, tensor in tensors.items():
        assert tensor.dtype == expected[name].dtype, name
        assert tensor.shape == expected[name].shape, name
        assert tensor.tobytes() == expected[name].tobytes(), name


def copy_of(case: str, folder: Path, **config_changes: Any) -> Path:
    """A writable copy of a golden checkpoint; a change to `...` removes the key."""
    folder = folder / case
    shutil.copytree(GOLDEN / case, folder)
    config = json.loads((folder / "config.json").read_text()) | config_changes
    config = {key: value for key, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def change_tensors(folder: Path, **tensors: np.ndarray | None) -> None:
    """Sets or, with None, removes tensors; `__` in a name stands for a dot."""
    file = folder / "model.safetensors"
    changes = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    contents = {name: t for name, t in (load_file(file) | changes).items() if t is not None}
    save_file(contents, file, metadata={"format": "pt"})


def test_bfloat16_parameters_are_the_file_s():
    kept = load_pretrained(GOLDEN / "bfloat16", param_dtype="bfloat16")
    widened = load_pretrained(GOLDEN / "bfloat16")
    kept, widened = nnx.state(kept), nnx.state(widened)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(kept)} == {"bfloat16"}
    chex.assert_trees_all_equal(jax.tree.map(lambda a: a.astype("float32"), kept), widened)


# Round trips

LARGE = 5 * 1024**3  # of one file


@pytest.mark.parametrize(
    "case, max_shard_size",
    [
        pytest.param(case, size, marks=pytest.mark.full if size == LARGE and i else ())
        for i, case in enumerate(CASES)
        for size in (LARGE, 4000)
    ],
)
def test_round_trip_is_exact(case, max_shard_size, tmp_path):
    param_dtype = "bfloat16" if case == "bfloat16" else "float32"
    model = load_pretrained(GOLDEN / case, param_dtype=param_dtype)
    save_pretrained(model, tmp_path, max_shard_size=max_shard_size)
    assert_same_bits(tensors_in(tmp_path), tensors_in(GOLDEN / case))
    again = load_pretrained(tmp_path, param_dtype=param_dtype)
    assert again.config == model.config
    chex.assert_trees_all_equal(nnx.state(again), nnx.state(model))


def test_shards_are_within_the_limit_and_indexed(tmp_path):
    model = load_pretrained(GOLDEN / "gqa")
    save_pretrained(model, tmp_path, max_shard_size=10_000)
    files = sorted(file.name for file in tmp_path.iterdir())
    count = len(files) - 2
    shards = [f"model-{i:05}-of-{count:05}.safetensors" for i in range(1, count + 1)]
    assert files == ["config.json", *shards, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    sizes = {name: tensor.nbytes for name, tensor in tensors_in(tmp_path).items()}
    assert index["metadata"]["total_size"] == sum(sizes.values())
    for shard in shards:
        names = set(load_file(tmp_path / shard))
        assert names == {name for name, file in index["weight_map"].items() if file == shard}
        assert sum(sizes[name] for name in names) <= 10_000


def test_layers_are_written_in_order(tmp_path):
    config = dataclasses.replace(load_pretrained(GOLDEN / "gqa").config, num_hidden_layers=11)
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Llama(config, rngs=nnx.Rngs(0))))
    rng = np.random.default_rng(0)
    random = lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), leaf.dtype)
    model = nnx.merge(graphdef, jax.tree.map(random, shapes))
    save_pretrained(model, tmp_path, max_shard_size=1)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    layers = [int(n.split(".")[2]) for n in index["weight_map"] if n.startswith("model.layers.")]
    assert layers == sorted(layers) and len(set(layers)) == 11
    chex.assert_trees_all_equal(nnx.state(load_pretrained(tmp_path)), nnx.state(model))


def test_saving_replaces_an_earlier_checkpoint_and_keeps_other_files(tmp_path):
    gqa, tied = load_pretrained(GOLDEN / "gqa"), load_pretrained(GOLDEN / "mha_tied")
    (tmp_path / "tokenizer.json").write_text("{}")
    save_pretrained(gqa, tmp_path, max_shard_size=10_000)
    save_pretrained(tied, tmp_path)
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert_same_bits(tensors_in(tmp_path), tensors_in(GOLDEN / "mha_tied"))
    save_pretrained(gqa, tmp_path, max_shard_size=10_000)
    assert not (tmp_path / "model.safetensors").exists()
    chex.assert_trees_all_equal(nnx.state(load_pretrained(tmp_path)), nnx.state(gqa))


def test_a_failed_save_leaves_the_earlier_checkpoint(tmp_path, monkeypatch):
    gqa, tied = load_pretrained(GOLDEN / "gqa"), load_pretrained(GOLDEN / "mha_tied")
    save_pretrained(gqa, tmp_path)

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("models.llama_hf.config_to_hf", fail)
    with pytest.raises(OSError, match="disk full"):
        save_pretrained(tied, tmp_path)
    chex.assert_trees_all_equal(nnx.state(load_pretrained(tmp_path)), nnx.state(gqa))


def test_a_mesh_splits_the_parameters_and_gives_them_back(tmp_path):
    mesh = make_mesh(data=2, fsdp=2, devices=jax.devices()[:4])
    model = load_pretrained(GOLDEN / "gqa", mesh=mesh)
    kernel = model.layers.mlp.up_proj.kernel
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(2, 16, 40)}
    assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(nnx.state(model)))
    chex.assert_trees_all_equal(nnx.state(model), nnx.state(load_pretrained(GOLDEN / "gqa")))
    save_pretrained(model, tmp_path)
    assert_same_bits(tensors_in(tmp_path), tensors_in(GOLDEN / "gqa"))


# Files


def test_a_tied_model_ignores_an_equal_output_embedding_in_the_file(tmp_path):
    folder = copy_of("mha_tied", tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    change_tensors(folder, lm_head__weight=embedding)
    loaded, expected = load_pretrained(folder), load_pretrained(GOLDEN / "mha_tied")
    chex.assert_trees_all_equal(nnx.state(loaded), nnx.state(expected))


# Only the last row differs. It is read in a piece of its own.
@pytest.mark.parametrize("piece_bytes", [1, 64 * 1024**2])
def test_a_tied_model_with_another_output_embedding_is_refused(piece_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr("models.hf_files._PIECE_BYTES", piece_bytes)
    folder = copy_of("mha_tied", tmp_path)
    other = load_file(folder / "model.safetensors")["model.embed_tokens.weight"].copy()
    other[-1, -1] += 1e-3
    change_tensors(folder, lm_head__weight=other)
    with pytest.raises(ValueError, match=r"config\.json has tie_word_embeddings=true, but lm_head"):
        load_pretrained(folder)


def test_a_tied_model_with_an_output_embedding_in_shards(tmp_path):
    """The two tensors lie in two files. Another shape or dtype is refused before the read."""
    folder = copy_of("mha_tied", tmp_path)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    index = dict.fromkeys(load_file(folder / "model.safetensors"), "a.safetensors")
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index |= {"lm_head.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    rounded = embedding.astype(ml_dtypes.bfloat16)
    for tensor, message in (
        (embedding, None),
        (rounded, "differs from model.embed_tokens.weight"),
        (embedding.T.copy(), r"lm_head\.weight in b\.safetensors has shape"),
        (embedding.astype(np.int32), r"lm_head\.weight in b\.safetensors has dtype I32"),
    ):
        save_file({"lm_head.weight": tensor}, folder / "b.safetensors")
        if message is None:
            load_pretrained(folder)
            continue
        with pytest.raises(ValueError, match=message):
            load_pretrained(folder)


def test_stored_rotary_frequencies_are_ignored(tmp_path):
    folder = copy_of("gqa", tmp_path)
    inv_freq = {
        f"model__layers__{i}__self_attn__rotary_emb__inv_freq": np.ones(4, np.float32)
        for i in range(2)
    }
    change_tensors(folder, **inv_freq)
    chex.assert_trees_all_equal(
        nnx.state(load_pretrained(folder)), nnx.state(load_pretrained(GOLDEN / "gqa"))
    )


@pytest.mark.parametrize("dtype", [np.float16, np.float64, ml_dtypes.bfloat16])
def test_other_float_dtypes_are_converted(dtype, tmp_path):
    folder = copy_of("gqa", tmp_path)
    norm = load_file(folder / "model.safetensors")["model.norm.weight"].astype(dtype)
    change_tensors(folder, model__norm__weight=norm)
    loaded = load_pretrained(folder).norm.weight[...]
    assert loaded.dtype == jnp.float32
    np.testing.assert_array_equal(loaded, norm.astype(np.float32))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model__layers__1__mlp__up_proj__weight": None},
            r"does not fit its config\.json; take both from one model:\n"
            r"model\.layers\.1\.mlp\.up_proj\.weight is missing",
        ),
        ({"lm_head__weight": None}, r"lm_head\.weight is missing"),
        (
            {"model__layers__2__mlp__up_proj__weight": np.zeros((40, 32), np.float32)},
            r"layers\.2\.mlp\.up_proj\.weight in model\.safetensors, of shape \(40, 32\), is not",
        ),
        (
            {"model__layers__0__self_attn__q_proj__bias": np.zeros(32, np.float32)},
            r"model\.layers\.0\.self_attn\.q_proj\.bias .* is not part of the model",
        ),
        (
            {"model__layers__0__mlp__up_proj__weight": np.zeros((32, 40), np.float32)},
            r"mlp\.up_proj\.weight in model\.safetensors has shape \(32, 40\), expected \(40, 32\)",
        ),
        (
            {"model__norm__weight": np.ones(32, np.int8)},
            r"model\.norm\.weight in model\.safetensors has dtype I8, expected a float",
        ),
    ],
)
def test_tensors_that_do_not_fit_raise(changes, message, tmp_path):
    folder = copy_of("gqa", tmp_path)
    change_tensors(folder, **changes)
    with pytest.raises(ValueError, match=message):
        load_pretrained(folder)


def test_a_long_list_of_problems_is_cut(tmp_path):
    folder = copy_of("gqa", tmp_path, num_hidden_layers=5)
    with pytest.raises(ValueError, match=r"layers\.2\..* is missing\n(?s:.*) 7 more") as error:
        load_pretrained(folder)
    assert str(error.value).count("\n") == 21


def test_missing_files_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json does not exist; name"):
        load_pretrained(tmp_path)
    folder = copy_of("gqa", tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor .*json; name"):
        load_pretrained(folder)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"\['pytorch_model\.bin'\] are not read, because"):
        load_pretrained(folder)


def test_a_missing_or_wrong_shard_raises(tmp_path):
    folder = copy_of("padded_sharded", tmp_path)
    shard = folder / "model-00002-of-00005.safetensors"
    shutil.copy(folder / "model-00001-of-00005.safetensors", shard)
    with pytest.raises(
        ValueError, match=r"model-00002-of-00005\.safetensors lacks 'model\.layers.*; download"
    ):
        load_pretrained(folder)
    shard.unlink()
    with pytest.raises(
        FileNotFoundError,
        match=r"model-00002-of-00005.*index\.json names, does not exist; download",
    ):
        load_pretrained(folder)


def test_sizes_that_no_file_has_are_refused_before_anything_is_made(tmp_path):
    """A billion layers would take all memory for their names alone."""
    huge = 2**31 - 4
    for name, value, message in (
        (
            "num_hidden_layers",
            10**9,
            r"num_hidden_layers=1000000000, but its files have 21 tensors; take both",
        ),
        ("vocab_size", huge, r"embed_tokens\.weight in .* expected \(2147483644, 32\)"),
        ("hidden_size", huge, r"expected \(48, 2147483644\)"),
        ("intermediate_size", huge, r"up_proj\.weight in .* expected \(2147483644, 32\)"),
        ("head_dim", huge, r"k_proj\.weight in .* expected \(4294967288, 32\)"),
        ("vocab_size", 2**31, r"vocab_size=2147483648 must be a whole number from 1 to"),
        ("vocab_size", 10**300, r"vocab_size=10+ must be a whole number from 1 to"),
    ):
        folder = copy_of("gqa", tmp_path / f"{name}{len(str(value))}{value % 7}", **{name: value})
        with pytest.raises(ValueError, match=message):
            load_pretrained(folder)


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_files_have_the_mode_of_the_umask(umask, tmp_path):
    model = load_pretrained(GOLDEN / "gqa")
    before = os.umask(umask)
    try:
        save_pretrained(model, tmp_path, max_shard_size=20_000)
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in tmp_path.iterdir()}
    assert len(modes) > 4 and set(modes.values()) == {0o666 & ~umask}, modes


def test_saving_does_not_write_through_links(tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    folder = tmp_path / "folder"
    folder.mkdir()
    names = ("config.json", "model.safetensors")
    for name in (*names, *(f"{name}.tmp" for name in names)):
        (folder / name).symlink_to(outside)
    save_pretrained(load_pretrained(GOLDEN / "gqa"), folder)
    assert outside.read_text() == "mine"
    assert not any(path.is_symlink() for path in folder.iterdir())
