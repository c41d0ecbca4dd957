"""The choice of a plan, and its description."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import implementation, linear_cross_entropy_plan
from pallas_kernels.gpu.device import Device
from pallas_kernels.loss import plan as plan_module
from pallas_kernels.loss.mosaic_gpu import in_place, linear_launch, logits, products
from pallas_kernels.loss.plan import InPlace, TokenChunks
from support.loss_formulas import BF16, F16, F32

H100 = Device("NVIDIA H100 80GB HBM3", (9, 0), 132)
MIB = 2**20


@pytest.fixture
def h100(monkeypatch):
    """The planner's device."""
    for module in (plan_module, logits, products, linear_launch):
        monkeypatch.setattr(module, "target_device", lambda: H100)
    monkeypatch.setattr(implementation, "reason_not_here", lambda: None)


def arguments(num_tokens, hidden, vocab, dtype=BF16, weight_dtype=F32, weight_layout="vd"):
    shape = jax.ShapeDtypeStruct
    of_weight = (vocab, hidden) if weight_layout == "vd" else (hidden, vocab)
    x, weight = shape((num_tokens, hidden), dtype), shape(of_weight, weight_dtype)
    return x, weight, shape((num_tokens,), jnp.int32)


def described(num_tokens, hidden, vocab, dtype: Any = BF16, weight_dtype: Any = F32, **options):
    layout = options.get("weight_layout", "vd")
    x, weight, labels = arguments(num_tokens, hidden, vocab, dtype, weight_dtype, layout)
    return linear_cross_entropy_plan(x, weight, labels, **options)


@pytest.fixture
def chosen(monkeypatch):
    """The plan itself, of the same arguments as `described`."""
    found = []
    choose = plan_module.choose

    def recorded(request):
        found.append(choose(request))
        return found[-1]

    monkeypatch.setattr("pallas_kernels.loss.description.choose", recorded)

    def plan_of(*sizes, **options):
        described(*sizes, **options)
        return found[-1].plan

    return plan_of


@pytest.mark.parametrize(
    "num_tokens, vocab_size, dtype, max_bytes, want",
    [
        # Without a limit a chunk has 512 MiB of 16 bits, or 1 GiB of float32; both are 2093 tokens.
        (8192, 128256, BF16, None, 2048),
        (8192, 128256, F32, None, 2048),
        (8193, 128256, BF16, None, 1792),  # 5 chunks, none of them tiny
        (8192, 152064, BF16, None, 1536),  # 1664 would fit
        (8192, 32000, BF16, None, 8192),
        (4096, 128256, BF16, None, 1536),  # 3 chunks instead of 2
        (8192, 2**21, BF16, None, 128),
        (300, 2**20, BF16, None, 128),  # 256 would be two chunks, which run as three
        (0, 32000, BF16, None, 128),
        (1, 32000, BF16, None, 128),
        # A limit holds.
        (8192, 128256, BF16, 2**28, 1024),
        (8192, 128256, F32, 2**29, 1024),
        (8192, 2**15, BF16, 768 * 2**16, 768),
        (8192, 2**15, BF16, 768 * 2**16 - 1, 640),
        (512, 2**15, BF16, 2**24, 171),  # 256 would be two chunks, which run as three
        (256, 2**15, BF16, 2**24, 256),
        # A chunk has at least a tile, even where a tile exceeds the limit.
        (8192, 128256, BF16, 2**24, 128),
        (8192, 128256, F32, 2**24, 128),
        (8192, 128256, BF16, 1, 128),
        (100, 50, F32, 1, 128),
    ],
    ids=str,
)
def test_sizes_of_chunks(chosen, num_tokens, vocab_size, dtype, max_bytes, want):
    # Chunks of float32 logits, or of the kernel's logits: with a softcap no kernel keeps
    # exponentials.
    implementation = "xla" if dtype == F32 else "mosaic_gpu"
    options = {"implementation": implementation, "logit_softcap": 30.0}
    plan = chosen(num_tokens, 4096, vocab_size, dtype=dtype, max_logits_bytes=max_bytes, **options)
    assert plan == TokenChunks(chunk_size=want, by_exponentials=False)
    if max_bytes is not None and want > 128:
        assert want * vocab_size * jnp.dtype(dtype).itemsize <= max_bytes


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize(
    "shape, weight_dtype, limit, want",
    [
        # (inside, beside, chunk size, bands), and the dtype of dweight.
        ((8192, 4096, 128256), F32, None, (8192, 0, None, (4224, 29, 5760), F32)),
        ((8192, 4096, 128256), F32, 96 * MIB, (8192, 0, None, (4224, 29, 5760), F32)),
        ((8192, 4096, 128256), BF16, None, (8192, 0, None, (4224, 29, 5760), F32)),
        ((4096, 4096, 128256), BF16, None, (4096, 0, None, (8448, 14, 9984), BF16)),
        ((5632, 4096, 128256), BF16, None, (4096, 1536, None, (8448, 14, 9984), BF16)),
        ((6145, 4096, 128256), BF16, None, (6145, 0, None, (4224, 29, 5760), F32)),
        ((8193, 4096, 128256), F32, None, (8192, 1, None, (4224, 29, 5760), F32)),
        ((8193, 4096, 128256), F32, 96 * MIB, (8192, 1, None, (4224, 29, 5760), F32)),
        ((16384, 2048, 128256), F32, 96 * MIB, (4096, 0, 384, (8448, 14, 9984), F32)),
        ((16384, 2048, 128256), F32, None, (4096, 0, 2048, (8448, 14, 9984), F32)),
        ((8192, 3584, 152064), F32, None, (7168, 1024, None, (3584, 41, 5120), F32)),
        ((8192, 2304, 256000), F32, None, (4096, 0, 1024, (5632, 44, 8192), F32)),
        # By the products alone, 4608 tokens in place and chunks of 1792 would be as fast.
        ((8192, 2304, 256000), F32, 1024 * MIB, (4096, 0, 2048, (5632, 44, 8192), F32)),
        # 5120 tokens fit. Their dx would have 400 tiles, for 132 multiprocessors.
        ((8192, 2560, 151936), F32, None, (4864, 0, 1664, (4992, 29, 7168), F32)),
        ((8192, 2560, 151936), F32, 1024 * MIB, None),
        # Bands by the limit, and none where all rows may be copied.
        ((8192, 4096, 128256), F32, 32 * MIB, (8192, 0, None, (1024, 124, 1280), F32)),
        ((8192, 4096, 128256), F32, 1, (8192, 0, None, (128, 1001, 128), F32)),
        ((8192, 4096, 48 * 128), F32, None, (8192, 0, None, (48 * 128, 0, 0), F32)),
        ((8192, 4096, 49 * 128), F32, 96 * MIB, (8192, 0, None, (1536, 3, 1664), F32)),
        ((8192, 4096, 256), F32, 1, (8192, 0, None, (256, 0, 0), F32)),
        # Rows of zeros follow the vocabulary, up to whole blocks.
        ((8192, 4096, 50257), F32, None, (8192, 0, None, (4096, 11, 5248), F32)),
        ((8192, 4096, 49 * 128), F32, None, (8192, 0, None, (1536, 3, 1664), F32)),
        # Chunks alone are faster.
        ((65536, 2048, 32000), F32, None, None),
        ((16384, 1024, 128256), F32, None, None),
        ((16384, 2048, 128256), F32, 1024 * MIB, None),
        ((8192, 4000, 128256), F32, None, None),
    ],
    ids=str,
)
def test_what_is_in_place(chosen, shape, weight_dtype, limit, want):
    plan = chosen(
        *shape, weight_dtype=weight_dtype, max_logits_bytes=limit, implementation="mosaic_gpu"
    )
    if want is None:
        assert not isinstance(plan, InPlace)
        return
    inside, beside, chunk_size, bands, dtype = want
    extent = in_place.Extent(inside, beside, jnp.dtype(dtype), in_place.Bands(*bands))
    assert (plan.extent, plan.chunk_size) == (extent, chunk_size)
    size, number, num_copied = bands
    assert size * max(1, number) + num_copied == shape[2] + -shape[2] % 128
    assert plan.without_dweight.by_exponentials


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize(
    "shape, limit, want",
    [
        # Each is at most 1 % slower than the fastest plan that an H200 measured within the limit.
        ((16384, 2048, 49152), 1024 * MIB, 6144),
        ((16384, 2560, 100352), 1024 * MIB, 4096),
        ((32768, 2048, 100352), 1024 * MIB, 5120),
        ((65536, 2048, 32000), None, 8192),
        ((8192, 1152, 262144), 1024 * MIB, 2048),
    ],
    ids=str,
)
def test_chunks_by_the_waves_of_dx(chosen, shape, limit, want):
    options = {"max_logits_bytes": limit, "implementation": "mosaic_gpu"}
    plan = chosen(*shape, weight_dtype=F32, **options)
    assert plan == TokenChunks(chunk_size=want, by_exponentials=True)


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize(
    "shape, weight_dtype, want",
    [
        # (inside, beside, chunk size, bands), and the dtype of dweight.
        ((8192, 4096, 128256), F32, (8192, 0, None, (5120, 24, 5376), F32)),
        ((4096, 4096, 128256), BF16, (4096, 0, None, (8448, 14, 9984), BF16)),
        ((8192, 4096, 256), F32, (8192, 0, None, (256, 0, 0), F32)),
        # Tiles of 256 columns, and blocks of 128 values of D.
        ((8192, 4096, 151936), F32, None),
        ((8192, 2880, 128256), F32, None),
    ],
    ids=str,
)
def test_what_is_in_place_of_columns(chosen, shape, weight_dtype, want):
    options: dict[str, Any] = {"implementation": "mosaic_gpu", "weight_layout": "dv"}
    plan = chosen(*shape, weight_dtype=weight_dtype, **options)
    if want is None:
        assert isinstance(plan, TokenChunks) and plan.by_exponentials
        assert "[D, V]" in described(*shape, weight_dtype=weight_dtype, **options).reason
        return
    inside, beside, chunk_size, bands, dtype = want
    extent = in_place.Extent(inside, beside, jnp.dtype(dtype), in_place.Bands(*bands))
    assert (plan.extent, plan.chunk_size) == (extent, chunk_size)
    size, number, num_copied = bands
    assert size * max(1, number) + num_copied == shape[2]


# The printed plan: (name, products with and without gradients, chunks, bytes, of which alone, and
# in the memory of dweight), and words of the reason.
@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize(
    "options, want, words",
    [
        ({}, ("in place", 3, 1, 1, 5760 * 2**14, 0, 128256 * 2**14), "estimate for an H100"),
        (
            {"reduction": "none"},
            ("in place", 4, 1, 1, 5760 * 2**14, 0, 128256 * 2**14),
            "estimate for an H100",
        ),
        ({"chunk_size": 2048}, ("token chunks", 3, 1, 4, 128256 * 2**12, 0, 0), "chunk_size=2048"),
        (
            {"label_smoothing": 0.1},
            ("token chunks", 3, 1, 4, 128256 * 2**12, 0, 0),
            "label_smoothing=0.1 adds to every entry",
        ),
        ({"vocab_chunk_size": 2048}, ("column chunks", 4, 1, 63, 2**25, 0, 0), "vocab_chunk_size"),
        (
            {"max_logits_bytes": 2**25, "logit_softcap": 30.0},
            ("token chunks", 3, 1, 64, 128256 * 2**8, 0, 0),
            "of 1 plans with at most 32 MiB of logits",
        ),
        (
            {"implementation": "xla"},
            ("token chunks", 3, 1, 4, 128256 * 2**13, 128256 * 2**13, 0),
            "only kernels",
        ),
        (
            {"implementation": "reference"},
            ("all logits", 3, 1, 1, 128256 * 2**15, 128256 * 2**15, 0),
            "keeps all logits",
        ),
    ],
    ids=str,
)
def test_a_plan_describes_itself(options, want, words):
    found = described(8192, 4096, 128256, **options)
    alone = found.num_products_alone
    sizes = found.logits_bytes, found.logits_bytes_alone, found.bytes_in_dweight
    assert (found.name, found.num_products, alone, found.num_chunks, *sizes) == want
    assert words in found.reason
    assert found.implementation == options.get("implementation", "mosaic_gpu")
    assert (found.why_no_kernel is None) == (found.implementation == "mosaic_gpu")
    text = str(found)
    assert f"{want[1]} matrix products" in text and found.reason in text


@pytest.mark.usefixtures("h100")
def test_a_plan_says_why_no_kernel_runs():
    assert "float32" in str(described(8192, 4096, 128256, dtype=F32))
    assert "the caller asked" in str(described(8, 8, 8, implementation="xla"))
    with jax.set_mesh(jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))):
        assert described(8, 8, 8).why_no_kernel is None
    assert "need the range of bfloat16" in described(8, 8, 8, dtype=F16).reason
    assert "label_smoothing=0.1 adds to" in described(8, 8, 8, label_smoothing=0.1).reason
    assert "logit_softcap=30.0 scales" in described(8, 8, 8, logit_softcap=30.0).reason


def test_a_plan_refuses_what_the_loss_refuses():
    with pytest.raises(ValueError, match="chunk_size=4 and vocab_chunk_size=8 each choose"):
        described(8, 8, 8, chunk_size=4, vocab_chunk_size=8)
    with pytest.raises(TypeError, match=r"chunks: not among the arguments of .*, chunk_size, "):
        described(8, 8, 8, chunks=4)
    assert described(8, 8, 8, check_labels=True, return_metrics=True).name == "token chunks"
    assert "not an NVIDIA GPU" in str(described(8, 8, 8))


@pytest.mark.usefixtures("h100")
def test_a_plan_that_exceeds_the_limit_is_the_last_resort(chosen):
    # A chunk of 128 tokens has 64 MB of logits. In place there are none.
    assert isinstance(chosen(128, 4096, 250880, max_logits_bytes=2**20), InPlace)
    assert isinstance(chosen(128, 4096, 250880), TokenChunks)
    found = described(128, 4096, 250880, max_logits_bytes=2**20, logit_softcap=30.0)
    assert "or 128 tokens in a chunk" in found.reason


@pytest.fixture
def request_of(monkeypatch):
    """The planner's request for the arguments of `described`."""
    requests = []
    choose = plan_module.choose
    monkeypatch.setattr(
        "pallas_kernels.loss.description.choose",
        lambda request: choose(requests.append(request) or request),
    )

    def found(*sizes, **options):
        described(*sizes, **options)
        return requests[-1]

    return found


@pytest.mark.usefixtures("h100")
@pytest.mark.parametrize("shape", [(8192, 2560, 151936), (8193, 4096, 128256)], ids=str)
def test_tokens_beside_follow_a_full_memory(request_of, shape):
    """The products read the memory of `dweight` whole; other extents gave NaN on a GPU."""
    found, _ = plan_module.candidates(request_of(*shape, max_logits_bytes=2**30))
    extents = [c.plan.extent for c in found if isinstance(c.plan, InPlace)]
    beside = [extent for extent in extents if extent.num_beside]
    assert beside and all(extent.num_inside == 2 * shape[1] for extent in beside)
    assert all(extent.num_inside <= 2 * shape[1] for extent in extents)


@pytest.mark.usefixtures("h100")
def test_the_choice_has_the_least_estimate(request_of):
    request = request_of(8192, 2560, 151936)
    found, refused = plan_module.candidates(request)
    assert refused is None and len(found) == len({c.plan for c in found})
    kinds = {(type(c.plan), c.plan.chunk_size is None) for c in found}
    assert kinds == {(TokenChunks, False), (InPlace, False)}  # the rest is more than a chunk
    assert all(0 < c.num_bytes <= plan_module.limit_of(request) for c in found)
    best = next(c for c in found if c.plan == plan_module.choose(request).plan)
    assert all(best.seconds <= 1.01 * c.seconds for c in found)
