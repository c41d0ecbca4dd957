"""The planner: its choice, its cache on disk, its messages, and its estimates of a step."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import train.cli.plan
import train.loop
import train.setup
from models.llama import Llama
from models.remat import POLICIES
from models.sharding import make_mesh
from pallas_kernels.fp8 import RECIPES
from support import tiny_run
from support.plan_measures import MEASURES, Measures
from train import data
from train.config import DataConfig, MeshConfig, OptimizerConfig, TrainConfig, preset
from train.planner import aot, cost
from train.planner.cache import cached
from train.planner.plan import (
    PlanError,
    Programs,
    abstract_batch,
    plan,
    table,
    with_policies,
    with_remat,
)
from train.planner.target import target_elsewhere, target_here
from train.step import abstract_state, init_state

GIB = 2**30
H100 = aot.CHIPS["h100"]
# ms of a step measured on an H100, Llama 3.2 1B, 4 x 4096, kernels left to XLA: `minimal` in
# benchmarks/results/train_step_llama3.2-1b_h100_202611.md, the others in
# train_step_xla_policies_llama3.2-1b_h100_202611.md.
MEASURED = {
    (False, "minimal"): 273.8,
    (True, "minimal"): 294.0,
    (False, "attention"): 303.0,
    (True, "attention"): 312.4,
    (False, "full"): 321.4,
    (True, "full"): 327.0,
}
BASE = with_remat(preset("llama3.2-1b"), "auto")
TINY = TrainConfig(
    name="tiny",
    model=dataclasses.replace(tiny_run.MODEL, remat="auto"),
    data=DataConfig(source="synthetic", sequence_length=32, batch_size=8),
    optimizer=OptimizerConfig(warmup_steps=1),
    mesh=MeshConfig(fsdp=2),
    steps=2,
    eval_every=0,
    sample_tokens=0,
    save=False,
)
# A configuration for devices that share sequences; its layers, width and tokens of a step.
OF_TENSOR = dataclasses.replace(
    TINY, model=dataclasses.replace(TINY.model, num_key_value_heads=2, remat="minimal")
)
L, D, T = OF_TENSOR.model.num_hidden_layers, OF_TENSOR.model.hidden_size, 8 * 32


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path):
    """XLA's defaults, and a cache that the test owns."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRAIN_PLAN_CACHE", str(tmp_path / "cache"))


def target(memory_gib=80.0, num_devices=1):
    mesh = make_mesh(data=1, fsdp=num_devices, devices=jax.devices()[:num_devices])
    return target_elsewhere(H100, mesh, int(memory_gib * GIB))


def planned(memory_gib=80.0, measures=None, config=BASE):
    measures = measures or Measures()
    return plan(with_policies(config), target(memory_gib), measures)


def test_the_limit_is_the_memory_of_xla_less_a_margin(monkeypatch):
    assert target().limit_bytes == int(80 * GIB * 0.75 * 0.95)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert target().limit_bytes == int(80 * GIB * 0.5 * 0.95)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "0.9")
    assert target().limit_bytes == int(int(80 * GIB * 0.9) * 0.95)
    assert "90% of 80.0 GiB" in target().pool
    own = target_elsewhere(H100, target().mesh)
    assert own.pool_bytes == int(H100.limits.hbm_bytes * 0.9)
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "90%")
    with pytest.raises(ValueError, match="XLA_CLIENT_MEM_FRACTION='90%' is not a number; set the"):
        target()
    for share in ("92", "0", "nan"):
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", share)
        with pytest.raises(ValueError, match=f"='{share}' must be above 0 and at most 1, as in 0"):
            target()


@pytest.mark.parametrize(
    ("memory_gib", "remat", "compiled"),
    [
        (200, "none", ["none"]),
        # `minimal` takes 58 GiB of 57, so the next policy follows. `none` is hopeless and not
        # compiled.
        (80, "mlp_inputs", ["minimal", "mlp_inputs"]),
        (81.5, "minimal", ["minimal"]),
        (45, "attention", ["attention"]),
        # 25 GiB estimated are worth a try, and the compiled program takes 20.
        (30, "full", ["full"]),
    ],
)
def test_the_fastest_that_fits_is_chosen_and_no_more_is_compiled(memory_gib, remat, compiled):
    measures = Measures()
    assert planned(memory_gib, measures).best.remat == remat
    assert measures.compiled == compiled


def test_a_policy_that_does_not_compile_is_passed_over():
    measures = Measures(failing=("minimal",))
    chosen = planned(81.5, measures)
    assert chosen.best.remat == "mlp_inputs"
    assert re.search(r"minimal .* fails", table(chosen))


def test_a_fixed_policy_is_not_changed():
    chosen = planned(config=with_remat(BASE, "attention"))
    assert [candidate.remat for candidate in chosen.candidates] == ["attention"]
    unrolled = dataclasses.replace(BASE.model, scan_layers=False)
    configs = with_policies(dataclasses.replace(BASE, model=unrolled))
    assert not any(config.model.scan_layers for config in configs)
    assert {config.model.remat for config in configs} == {*POLICIES} - {"offload"}


def test_nothing_fits():
    measures = Measures()
    with pytest.raises(PlanError) as error:
        planned(20, measures)
    message = str(error.value)
    assert "14.2 GiB of each NVIDIA H100" in message and "75% of 20.0 GiB, less 5%" in message
    # The least estimate is 22 GiB, so the planner compiles that policy and names it.
    assert "remat offload, 4 x 4096 tokens, needs 22.0 GiB, 7.8 too many" in message
    for advice in (
        "--data.batch-size 2",
        "--mesh.fsdp",
        "--model.param-dtype bfloat16",
        "MEM_FRACTION=0.92",
        "--data.sequence-length",
    ):
        assert advice in message
    with pytest.raises(PlanError, match=r"--model\.remat auto"):
        planned(20, config=with_remat(BASE, "attention"))
    here = dataclasses.replace(target(20), pool="the share that XLA's allocator may take here")
    with pytest.raises(PlanError, match=r"MEM_FRACTION=0\.92"):
        plan(with_policies(BASE), here, Measures())
    with pytest.raises(PlanError) as error:
        whole = dataclasses.replace(here, is_share=False)
        plan(with_policies(BASE), whole, Measures())
    assert "MEM_FRACTION" not in str(error.value)
    with pytest.raises(PlanError, match=r"no candidate compiles.*no such kernel.*--model\.remat"):
        planned(80, Measures(failing=MEASURES))
    # There are as many sequences as devices, so only devices that share sequences can have fewer.
    of_four = dataclasses.replace(BASE, mesh=MeshConfig(fsdp=4))
    with pytest.raises(PlanError) as error:
        plan(with_policies(of_four), target(20, 4), measures)
    assert "--mesh.tensor 2 --mesh.fsdp 2 --data.batch-size 2" in str(error.value)
    # Four devices share 12 rows. Half of them, 6, would not be a multiple of 4.
    twelve = dataclasses.replace(of_four, data=dataclasses.replace(of_four.data, batch_size=12))
    with pytest.raises(PlanError, match=r"--data\.batch-size 4 \(--data\.accumulation-steps"):
        plan(with_policies(twelve), target(20, 4), measures)


def test_table():
    lines = table(planned()).splitlines()
    assert "llama3.2-1b on 1 x NVIDIA H100" in lines[0] and "scanned" in lines[0]
    assert "mesh: data x fsdp x tensor" in lines[0]
    assert "limit 57.0 GiB a device: XLA's 75% of 80.0 GiB, less 5%" in lines[1]
    rows = {line[2:].split()[0]: line for line in lines[3:-1]}
    assert set(rows) == set(MEASURES)
    assert rows["none"].split()[:7] == ["none", "1x1x1", "4", "~90.0", "~no", "200", "81.9k"]
    assert rows["minimal"].split()[:6] == ["minimal", "1x1x1", "4", "58.0", "no", "270"]
    assert rows["mlp_inputs"].split()[:6] == ["*", "mlp_inputs", "1x1x1", "4", "41.0", "yes"]
    assert rows["full"].split()[:5] == ["full", "1x1x1", "4", "~25.0", "~yes"]
    assert POLICIES["full"].description in rows["full"]
    assert "estimated" in lines[-1]
    # 50 GiB estimated may turn out to be more than 58.
    unsure = table(planned(81.5, Measures(MEASURES | {"full": (0.35, 50, 20)}))).splitlines()
    assert next(line for line in unsure if line.startswith("  full")).split()[3:5] == ["~50.0", "?"]


def test_cache(tmp_path):
    folder = tmp_path / "cache"

    def measures_of_a_plan(memory_gib=80.0, config=BASE):
        measures, where = Measures(), target(memory_gib)
        configs = with_policies(config)
        chosen = plan(configs, where, cached(measures, where))
        return chosen.best.remat, measures

    _, first = measures_of_a_plan()
    assert sorted(first.estimated) == sorted(MEASURES) and len(first.compiled) == 2
    files = sorted(folder.iterdir())
    assert len(files) == len(MEASURES) and {path.suffix for path in files} == {".json"}
    remat, second = measures_of_a_plan()
    assert (remat, second.estimated, second.compiled) == ("mlp_inputs", [], [])

    # Another limit compiles only policies that were not compiled before.
    remat, third = measures_of_a_plan(58.0)
    assert (remat, third.estimated) == ("mlp_inputs", [])
    remat, third = measures_of_a_plan(45.0)
    assert (remat, third.estimated, third.compiled) == ("attention", [], ["attention"])

    # The name of a run changes nothing. The model changes the key.
    assert not measures_of_a_plan(config=dataclasses.replace(BASE, name="x", seed=3))[1].compiled
    other = dataclasses.replace(BASE, model=dataclasses.replace(BASE.model, scan_layers=False))
    assert measures_of_a_plan(config=other)[1].compiled

    for content in ("", "{", "[1]", '{"seconds": "fast"}', '{"seconds": -1, "memory_bytes": NaN}'):
        for path in files:
            path.write_text(content)
        remat, damaged = measures_of_a_plan()
        assert (remat, len(damaged.compiled)) == ("mlp_inputs", 2), content
        assert json.loads(files[0].read_text())["seconds"] > 0


def test_cache_off_and_not_writable(tmp_path, monkeypatch):
    measures = Measures()
    monkeypatch.setenv("TRAIN_PLAN_CACHE", "")
    assert cached(measures, target()) is measures
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRAIN_PLAN_CACHE", str(tmp_path / "file" / "below"))
    assert planned(measures=cached(measures, target())).best.remat == "mlp_inputs"


def cost_of_step(fsdp, tensor, monkeypatch):
    """The planner's counts for a step, its seconds and its bytes."""
    found, estimate = [], cost.Program.estimate
    record = lambda *args, **options: found.append(estimate(*args, **options)) or found[-1]
    devices = jax.devices()[: fsdp * tensor]
    mesh = make_mesh(data=1, fsdp=fsdp, tensor=tensor, devices=devices)
    with monkeypatch.context() as patch:
        patch.setattr(cost.Program, "estimate", record)
        seconds, nbytes = Programs(target_elsewhere(H100, mesh)).estimate(OF_TENSOR)
    return found[0], seconds, nbytes


@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.full), 2])
def test_weights_in_fp8_are_gathered_in_fp8(tensor, monkeypatch):
    """2 s a case."""
    chip = dataclasses.replace(H100, link_bandwidth=1e3)  # so slow that a step takes its time
    mesh = make_mesh(data=1, fsdp=2, tensor=tensor, devices=jax.devices()[: 2 * tensor])
    recipe = dataclasses.replace(RECIPES["tensorwise"], least_size=0)
    monkeypatch.setitem(RECIPES, "tensorwise", recipe)
    config = with_remat(OF_TENSOR, "full")

    def received(**changes) -> float:
        model = dataclasses.replace(config.model, dtype="bfloat16", **changes)
        programs = Programs(target_elsewhere(chip, mesh))
        with jax.numpy_dtype_promotion("standard"):
            seconds, _ = programs.estimate(dataclasses.replace(config, model=model))
        return seconds * 1e3 * cost.LINK_EFFICIENCY

    layers = nnx.state(nnx.eval_shape(lambda: Llama(config.model, rngs=nnx.Rngs(0)).layers))
    in_fp8 = sum(leaf.size for leaf in jax.tree.leaves(layers) if leaf.ndim == 3)
    # The devices of `fsdp` share what one device of `tensor` works with. Each has half of it. It
    # gathers the other half in the forward and in the backward, with one byte less each time.
    assert received() - received(fp8="tensorwise") == pytest.approx(in_fp8 / tensor)


def test_every_accumulated_batch_gathers_the_parameters():
    mesh = make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])
    programs, config = Programs(target_elsewhere(H100, mesh)), with_remat(TINY, "full")
    state = abstract_state(config, mesh)

    def received(number: int) -> float:
        data = dataclasses.replace(config.data, accumulation_steps=number)
        return programs._hidden_link_bytes(dataclasses.replace(config, data=data), state, ())

    assert received(4) == 4 * received(1) > 0


@pytest.mark.full
@pytest.mark.parametrize(("fsdp", "tensor"), [(1, 2), (2, 2)])
def test_devices_that_share_sequences_share_the_cost(fsdp, tensor, monkeypatch):
    one, _, bytes_of_one = cost_of_step(1, 1, monkeypatch)
    part, seconds, nbytes = cost_of_step(fsdp, tensor, monkeypatch)
    assert part.flops == one.flops / (fsdp * tensor)
    assert nbytes == pytest.approx(bytes_of_one / (fsdp * tensor), rel=0.2)
    # A sublayer gathers its tokens and scatters their sums, forward and backward. It also gathers
    # tensors that were kept in parts. Embeddings and loss do the same once in each direction.
    arrays = (10 * L + 4) * T // fsdp * D * 4
    statistics = 5 * 4 * tensor * T // fsdp
    norms = 2 * (2 * L + 1) * D * 4
    received = (arrays + statistics + norms) * (1 - 1 / tensor)
    assert part.link_bytes == pytest.approx(received, rel=0.01)
    rates = target_elsewhere(H100, make_mesh(data=1, fsdp=8)).rates
    assert seconds >= part.seconds > rates.link_seconds(part.link_bytes)


def test_heads_are_not_copied_for_a_plan():
    mesh = make_mesh(data=1, fsdp=1, tensor=2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match=r"tensor=2 does not divide num_key_value_heads=1"):
        Programs(target_elsewhere(H100, mesh)).estimate(with_remat(TINY, "full"))


@pytest.fixture(scope="module")
def estimates(request):
    """Estimates for the measured steps, traced for a GPU with cuDNN's attention.

    Unrolled layers, which take longer to trace, are in `--full` alone.
    """
    where, found = target(), {}
    steps = [key for key in MEASURED if key[0] or request.config.option.full]
    with pytest.MonkeyPatch.context() as patch:
        cudnn = "jax._src.cudnn.fused_attention_stablehlo"
        patch.setattr(f"{cudnn}.check_cudnn_version", lambda: 91000)  # it need not be here
        for scan_layers, remat in steps:
            model = dataclasses.replace(
                BASE.model,
                scan_layers=scan_layers,
                remat=remat,
                implementation="xla",
                attention_implementation="cudnn",
            )
            config = dataclasses.replace(BASE, model=model)
            found[scan_layers, remat] = Programs(where).estimate(config)
    return found


def test_estimates_agree_with_measurements(estimates):
    predicted = {key: seconds * 1e3 for key, (seconds, _) in estimates.items()}
    print(*(f"{key}: {predicted[key]:.0f} ms, measured {MEASURED[key]}" for key in predicted))
    for scan_layers in (False, True):
        same = [key for key in predicted if key[0] == scan_layers]
        assert sorted(same, key=predicted.__getitem__) == sorted(same, key=MEASURED.__getitem__)
    for scan_layers, remat in predicted:
        if not scan_layers:
            assert predicted[True, remat] > predicted[False, remat]
    assert {(True, "minimal"), (True, "attention"), (True, "full")} <= predicted.keys()
    for key, milliseconds in predicted.items():
        assert milliseconds == pytest.approx(MEASURED[key], rel=0.1), key


def test_estimated_memory_agrees_with_the_compiler_s(estimates):
    # GiB, compiled for an H100 by JAX 0.11.2.
    compiled = {"minimal": 34.6, "attention": 23.7, "full": 21.2}
    for remat, gib in compiled.items():
        assert estimates[True, remat][1] / GIB == pytest.approx(gib, rel=0.1), remat


def test_unknown_devices_get_an_order_and_no_figures():
    mesh = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
    here = target_here(mesh)
    assert not here.rates.known and here.pool_bytes > GIB
    chosen = plan(
        with_policies(BASE), here, Measures({k: (*v[:1], 0.1, 0.1) for k, v in MEASURES.items()})
    )
    assert "times only show the order" in table(chosen)


@pytest.mark.parametrize("source", [pytest.param("synthetic", marks=pytest.mark.full), "stdlib"])
def test_the_planner_compiles_the_program_of_training(source, monkeypatch):
    """Shapes, dtypes and shardings of the state and of the batch."""
    config = with_remat(TINY, "full")
    config = dataclasses.replace(config, data=dataclasses.replace(TINY.data, source=source))
    mesh = make_mesh(data=4, fsdp=2)
    corpus = data.Corpus({f"{i}.py": b"def f(x):\n    return x\n" * 9 for i in range(40)})
    monkeypatch.setattr(data, "stdlib_corpus", lambda: corpus)
    dataset = train.setup.open_datasets(config).train
    batch = train.setup.batch_on_devices(config, mesh, dataset, 0)
    describe = lambda tree: jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), tree)
    assert describe(abstract_batch(config, mesh)) == describe(batch)
    with jax.set_mesh(mesh):
        state = init_state(config, mesh)
    expected, got = jax.tree.leaves(state), jax.tree.leaves(abstract_state(config, mesh))
    for real, abstract in zip(expected, got, strict=True):
        assert (real.shape, real.dtype) == (abstract.shape, abstract.dtype)
        assert real.sharding.is_equivalent_to(abstract.sharding, real.ndim)


@pytest.mark.parametrize(
    "mesh",
    [
        None,
        pytest.param(MeshConfig(), marks=pytest.mark.full),
        pytest.param(MeshConfig(fsdp=2), marks=pytest.mark.full),
        pytest.param(MeshConfig(fsdp=2, tensor=2), marks=pytest.mark.full),
    ],
)
def test_a_run_with_auto_trains_and_names_its_policy(
    mesh, compile_nothing, tmp_path, capsys, monkeypatch
):
    """The planner chooses of two policies; `tests/models/test_remat.py` compiles all.

    Without a mesh the planner compiles for one device, and the run computes nothing.
    """
    if mesh is None:
        alone = make_mesh(data=1, fsdp=1, devices=jax.devices()[:1])
        monkeypatch.setattr(train.loop, "mesh_of", lambda config: alone)
        monkeypatch.setattr(train.loop, "compile_steps", compile_nothing)
    both = lambda config: [with_remat(config, name) for name in ("none", "full")]
    monkeypatch.setattr(train.setup, "with_policies", both)
    config = with_remat(OF_TENSOR, "auto")
    config = dataclasses.replace(config, mesh=mesh or MeshConfig(), runs_dir=tmp_path)
    folder = train.loop.run(config)
    written = json.loads((folder / "config.json").read_text())
    assert written["config"]["model"]["remat"] == "auto"
    assert written["plan"]["remat"] in POLICIES
    assert 0 < written["plan"]["memory_bytes"] < written["plan"]["limit_bytes"]
    output = capsys.readouterr()
    assert f"* {written['plan']['remat']}" in output.out
    assert "compiling remat" in output.err
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 2


def test_a_model_with_auto_does_not_run():
    model = Llama(TINY.model, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"'auto' is not a policy.*python -m train"):
        model(jnp.zeros((1, 8), jnp.int32))


def test_chips_are_in_the_table_of_devices():
    for name, chip in aot.CHIPS.items():
        assert aot.chip(name) is aot.chip(chip.device_kind) is chip
        assert aot.chip_of_kind(chip.device_kind) is chip
        assert str(chip.limits.hbm_bytes) in chip.target_config()
    assert aot.chip("H100 SXM") is H100


def test_missing_compilers_are_named(monkeypatch):
    monkeypatch.setattr(aot, "missing_toolchain", lambda: "cuDNN (nvidia-cudnn-cu13)")
    with pytest.raises(RuntimeError, match=r"needs cuDNN.*make plan.*\[aot\]"):
        aot.devices(H100, 1)
