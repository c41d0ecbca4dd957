"""Options of XLA for GPUs: the choice for a program, and options that XLA does not take."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import pytest

import train.step
from models.sharding import make_mesh
from support.tiny_run import CONFIG
from train import xla_flags
from train.cli.command_line import parse_command_line
from train.planner.plan import abstract_batch
from train.step import abstract_state, jit_train_step

HIDING = "xla_gpu_enable_latency_hiding_scheduler"
LIMIT = "xla_gpu_experimental_parallel_collective_overlap_limit"


@pytest.fixture
def gpus(monkeypatch):
    """Devices that claim to be GPUs. Devices of this process accept every option."""

    def accepted(options, device):
        assert device.process_index == jax.process_index()
        return dict(options)

    monkeypatch.setattr(xla_flags, "accepted", accepted)
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    return [SimpleNamespace(platform="gpu", process_index=index) for index in (1, 0, 0)]


def test_options_unknown_to_xla_are_left_out_and_named_once(capsys):
    device = jax.devices()[0]
    options = ((HIDING, True), ("xla_no_such_option", 3), ("xla_gpu_no_more", True))
    assert xla_flags.accepted(options, device) == {HIDING: True}
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[1] for line in lines] == [
        " xla_no_such_option=3",
        " xla_gpu_no_more=true",
    ]
    assert xla_flags.accepted(options, device) == {HIDING: True}
    assert not capsys.readouterr().out


def test_a_value_that_xla_does_not_take_is_left_out_and_named(capsys):
    options = ((HIDING, "perhaps"), (LIMIT, 2))
    assert xla_flags.accepted(options, jax.devices()[0]) == {LIMIT: 2}
    assert f"left out: {HIDING}=perhaps" in capsys.readouterr().out


def test_this_version_takes_all_options(capsys):
    options = xla_flags.OPTIONS | xla_flags.OPTIONS_OF_ONE
    assert xla_flags.accepted(tuple(options.items()), jax.devices()[0]) == options
    assert not capsys.readouterr().out


def test_options_for_each_kind_of_program(gpus):
    options = xla_flags.compiler_options
    assert options(gpus) == xla_flags.OPTIONS
    assert options(gpus[1:2]) == xla_flags.OPTIONS_OF_ONE
    named = [f"{LIMIT}=3"]
    assert options(gpus[1:2], named) == xla_flags.OPTIONS_OF_ONE | {LIMIT: 3}
    assert options(jax.devices(), named) == {}


def test_named_options_are_added_or_replace(gpus):
    (name, value), *_ = xla_flags.OPTIONS.items()
    options = lambda *chosen: xla_flags.compiler_options(gpus, chosen)
    assert options("xla_other=a=b") == xla_flags.OPTIONS | {"xla_other": "a=b"}
    assert options(f"--{name}=7") == xla_flags.OPTIONS | {name: 7}
    assert value != 7
    assert options("none") == {}
    assert options("none", f"{HIDING}=false", "xla_share=0.5") == {HIDING: False, "xla_share": 0.5}


def test_the_environment_is_left_alone(gpus, monkeypatch):
    name = next(iter(xla_flags.OPTIONS))
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=x --{name}=9")
    others = {key: value for key, value in xla_flags.OPTIONS.items() if key != name}
    options = functools.partial(xla_flags.compiler_options, gpus)
    assert options() == others
    assert options([f"{name}=4"]) == others | {name: 4}


@pytest.mark.parametrize("value", [True, 3, 0.5, "COLLECTIVE_PIPELINING_MODE_ON", ""])
def test_values_are_read_as_they_are_written(value):
    assert xla_flags.parse([f"name={xla_flags.as_text(value)}"]) == {"name": value}


def test_a_misspelt_option_is_refused():
    with pytest.raises(ValueError, match=r"xla_options: 'xla_foo' must be name=value, .* 'none'"):
        dataclasses.replace(CONFIG, xla_options=("xla_foo",))


def test_the_command_line_takes_several():
    flags = ["--xla-options", "none", f"{LIMIT}=2"]
    assert parse_command_line(flags).xla_options == ("none", f"{LIMIT}=2")
    assert parse_command_line([]).xla_options == ()


def test_the_step_is_compiled_with_them(monkeypatch):
    mesh = make_mesh(data=8, fsdp=1)
    config = dataclasses.replace(CONFIG, xla_options=("xla_no_such_option=1",))
    seen = []

    def options(devices, chosen):
        seen.append(set(devices))
        return xla_flags.parse(chosen)

    monkeypatch.setattr(train.step, "compiler_options", options)
    with jax.set_mesh(mesh):
        state = abstract_state(config, mesh)
        lowered = jit_train_step(config, state).lower(state, abstract_batch(config, mesh))
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
            lowered.compile()
    assert seen == [set(jax.devices())]
