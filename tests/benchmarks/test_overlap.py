"""The collectives in a schedule, and steps timed on CPU devices."""

import argparse

import jax
import pytest

from benchmarks.training import overlap
from benchmarks.training.schedule import Collective, Schedule
from models.sharding import make_mesh
from train.planner import aot

# A collective of each form: beside a GEMM in a loop, wrapped, synchronous, and combined.
HLO = """HloModule step, is_scheduled=true

%product (a: bf16[8,4], b: bf16[4,16]) -> bf16[8,16] {
  %a = bf16[8,4]{1,0} parameter(0)
  %b = bf16[4,16]{1,0} parameter(1)
  ROOT %dot.1 = bf16[8,16]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: (bf16[8,4], bf16[4,16])) -> (bf16[8,4], bf16[4,16]) {
  %p = (bf16[8,4]{1,0}, bf16[4,16]{1,0}) parameter(0)
  %x = bf16[8,4]{1,0} get-tuple-element(%p), index=0
  %w = bf16[4,16]{1,0} get-tuple-element(%p), index=1
  %start = ((bf16[8,4]{1,0}), bf16[32,4]{1,0}) all-gather-start(%x), dimensions={0}
  %fusion = bf16[8,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%product
  %kernel = bf16[8,16]{1,0} custom-call(%x, %w, %w), custom_call_target="mosaic_gpu_v2", binary
  %done = bf16[32,4]{1,0} all-gather-done(%start)
  %late = bf16[8,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%product
  ROOT %tuple = (bf16[8,4]{1,0}, bf16[4,16]{1,0}) tuple(%x, %w)
}

%wrapped (y: f32[32,4]) -> f32[32,4] {
  %y = f32[32,4]{1,0} parameter(0)
  ROOT %exchange = f32[32,4]{1,0} all-to-all(%y), dimensions={0}
}

ENTRY %main (m: (bf16[8,4], bf16[4,16]), n: f32[32,4], q: bf16[2,8,2,4]) -> f32[] {
  %m = (bf16[8,4]{1,0}, bf16[4,16]{1,0}) parameter(0)
  %n = f32[32,4]{1,0} parameter(1)
  %q = bf16[2,8,2,4]{3,2,1,0} parameter(2)
  %loop = (bf16[8,4], bf16[4,16]) while(%m), body=%body, {"known_trip_count":{"n":"3"}}
  %begin = ((f32[32,4]{1,0}), f32[32,4]{1,0}) async-start(%n), calls=%wrapped
  %attention = (bf16[2,2,8,4]{3,2,1,0}, u8[0]) custom-call(%q), target="__cudnn$fmhaSoftmax"
  %gemm = (bf16[8,16]{1,0}, s8[9]) custom-call(%x, %w), target="__cublas$gemm", \
{"lhs_contracting_dimensions":["1"]}
  %end = f32[32,4]{1,0} async-done(%begin)
  %sum = (f32[8,4]{1,0}, f32[1,2]{1,0}) reduce-scatter(%end, %o), dimensions={0}
  %o = f32[4,2]{1,0} parameter(3)
  %sync = ((f32[]), f32[]) all-reduce-start(%s), {"is_sync":true}
  %s = f32[] constant(1)
  ROOT %total = f32[] all-reduce-done(%sync)
}
"""


def test_collectives_of_a_schedule():
    product, attention = 2 * 8 * 4 * 16, 2 * (2 * 2 * 8 * 4) * 8
    assert Schedule(HLO).collectives() == [
        Collective("all-gather", ((32, 4),), "body", 256, 192, 3, True, 3 * product),
        Collective("all-to-all", ((32, 4),), "main", 512, 512, 1, True, attention + product),
        Collective("reduce-scatter", ((8, 4), (1, 2)), "main", 544, 408, 1, False, 0),
        Collective("all-reduce", ((),), "main", 4, 8, 1, False, 0),
    ]


def test_the_table_and_the_exposed_time():
    chip = aot.CHIPS["h100"]
    large = Collective("all-gather", (), "main", 64 << 20, 48e6, 2, True, 3e9)
    small = Collective("all-reduce", (), "main", 4, 8, 1, False, 0)
    assert overlap.table([large, large, small]).splitlines()[2:] == [
        "| all-gather | 64 | 4 | yes | 3 |"
    ]
    found = overlap.exchange_ms(Schedule(HLO), chip)
    rates = 0.84 * 450e9, 0.69 * chip.limits.bf16_flops
    assert found == pytest.approx([seconds * 1e3 for seconds in Schedule(HLO).seconds(*rates)])


def test_computation_hides_an_exchange():
    schedule = Schedule(HLO)
    product, attention = 2 * 8 * 4 * 16, 2 * (2 * 2 * 8 * 4) * 8
    nbytes = 3 * 192 + 512 + 408 + 8
    # In each round of the loop three products run beside the gather and one runs after it.
    fast, slow = schedule.seconds(1.0, 1e9), schedule.seconds(1.0, product / 10)
    assert fast == pytest.approx((nbytes, nbytes), rel=1e-3)
    hidden = 3 * 30 + 10 * (attention + product) / product
    assert slow == pytest.approx((nbytes, nbytes - hidden))
    # If the computation takes long enough, it hides all except the synchronous collectives.
    assert schedule.seconds(1.0, 1.0) == pytest.approx((nbytes, 408 + 8))


@pytest.mark.full
def test_steps_are_timed_in_turns():
    arguments = argparse.Namespace(
        preset="demo",
        layers=1,
        vocab_size=64,
        remat="none",
        scan=False,
        rows=1,
        sequence_length=8,
    )
    config = overlap.config_of(arguments, 2, 1)
    mesh = make_mesh(data=1, fsdp=2, devices=jax.devices()[:2])
    with jax.set_mesh(mesh), jax.numpy_dtype_promotion("standard"):
        step = overlap.compile_step(config, mesh, {})
        steps = {"one": step, "other": step}
        times = overlap.times_of(config, mesh, steps, rounds=2, calls=2)
    assert times.keys() == steps.keys()
    assert all(len(of.times_ms) == 2 and min(of.times_ms) > 0 for of in times.values())
