"""Which library computes the attention of whole sequences, and what is logged or raised."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from models import attention
from models.attention import causal_attention
from pallas_kernels import document_bounds, implementation, logs
from pallas_kernels.attention import mosaic_gpu
from pallas_kernels.gpu.device import Device
from support.small_llama import S, changed, hidden_of, make_model, random_tokens

A100, H100, B200 = (8, 0), (9, 0), (10, 0)
TEN_OF_TWO = jnp.asarray([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1]], jnp.int32)
EIGHT_OF_TWO = TEN_OF_TWO[:, :8]


@pytest.fixture
def on_gpu(monkeypatch):
    """A function that makes a GPU of a compute capability the default device."""

    def use(capability):
        monkeypatch.setattr(logs, "_logged", set())
        device = Device("a GPU", capability, 132)
        for module in (attention, mosaic_gpu):
            monkeypatch.setattr(module, "target_device", lambda: device)
        for module in (attention, implementation):
            monkeypatch.setattr(module, "reason_not_here", lambda: None)

    return use


@pytest.fixture
def without_cudnn(monkeypatch):
    """The machine has no cuDNN."""
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", None)


@pytest.fixture
def calls(monkeypatch):
    """The attention that was called: the mask and the implementation, or the kernels' bounds."""
    made = []

    def by_jax(q, k, v, *, mask=None, is_causal, local_window_size, implementation):
        assert is_causal and local_window_size is None
        made.append((None if mask is None else np.asarray(mask), implementation))
        return q

    def by_kernels(q, k, v, bounds, *, implementation):
        made.append((None if bounds is None else np.asarray(bounds), implementation))
        return q

    monkeypatch.setattr(attention.jax.nn, "dot_product_attention", by_jax)
    monkeypatch.setattr(attention, "document_attention", by_kernels)
    return made


def attend(ids=None, *, implementation=None, head_dim=64, dtype=jnp.bfloat16, length=8):
    length = length if ids is None else ids.shape[1]
    q = jnp.ones((1, length, 2, head_dim), dtype)
    documents = None if ids is None else document_bounds(ids)
    return causal_attention(q, q, q, documents, implementation)


@pytest.mark.parametrize(
    "capability, shape, dtype, reason",
    [
        (A100, (1, 6, 2, 128), jnp.bfloat16, None),
        (H100, (1, 6, 2, 8), jnp.float16, None),
        (H100, (1, 6, 2, 256), jnp.bfloat16, None),
        (H100, (1, 6, 2, 64), jnp.float32, "takes bfloat16 and float16, not float32; set dtype"),
        (H100, (1, 6, 2, 264), jnp.bfloat16, "heads of 8, 16, ... or 256 channels here, not 264"),
        (A100, (1, 6, 2, 136), jnp.bfloat16, "heads of 8, 16, ... or 128 channels here, not 136"),
        (A100, (1, 6, 2, 12), jnp.bfloat16, "heads of 8, 16, ... or 128 channels here, not 12"),
        (H100, (1, 7, 2, 64), jnp.bfloat16, "an even number of positions, not 7; pad the"),
    ],
)
def test_what_the_attention_of_cudnn_takes(on_gpu, capability, shape, dtype, reason):
    on_gpu(capability)
    found = attention._why_no_cudnn(jnp.zeros(shape, dtype))
    assert found is None if reason is None else found is not None and reason in found


def assert_called(call, ids, by):
    """That `by` computed these documents; None is a row of one document."""
    arrays, implementation = call
    assert implementation == by
    if ids is None:
        assert arrays is None
    elif by == "mosaic_gpu":
        np.testing.assert_array_equal(arrays, document_bounds(ids))
    else:
        # Keys after the query are hidden by `is_causal`.
        (row,) = np.asarray(ids)
        visible = np.tril(row[:, None] == row)
        np.testing.assert_array_equal(np.tril(arrays), visible[None, None])


@pytest.mark.parametrize(
    ("asked_for", "chosen"),
    [(None, "mosaic_gpu"), ("mosaic_gpu", "mosaic_gpu"), ("cudnn", "cudnn"), ("xla", "xla")],
)
def test_on_hopper_kernels_compute_it(on_gpu, calls, caplog, asked_for, chosen):
    on_gpu(H100)
    with caplog.at_level(logging.WARNING):
        attend(EIGHT_OF_TWO, implementation=asked_for)
        attend(implementation=asked_for)
    assert_called(calls[0], EIGHT_OF_TWO, chosen)
    assert_called(calls[1], None, chosen)
    assert not caplog.records


@pytest.mark.parametrize("asked_for", ["cudnn", "xla"])
def test_the_mask_of_a_window(calls, asked_for):
    q, window = jnp.ones((1, 10, 2, 64), jnp.bfloat16), 3
    causal_attention(q, q, q, document_bounds(TEN_OF_TWO, window=window), asked_for)
    ((mask, _),) = calls
    (row,) = np.asarray(TEN_OF_TWO)
    distance = np.arange(10)[:, None] - np.arange(10)
    visible = (row[:, None] == row) & (distance >= 0) & (distance < window)
    np.testing.assert_array_equal(np.tril(mask), visible[None, None])


@pytest.mark.parametrize("window", [1, 3])
def test_cudnn_takes_the_window_of_rows_of_one_document(monkeypatch, window):
    """JAX's attention by XLA computes here what cuDNN is asked for. 1 s each."""
    attend, masks = jax.nn.dot_product_attention, []

    def by_xla(*args, mask, implementation, **options):
        assert implementation == "cudnn"
        masks.append(mask)
        return attend(*args, mask=mask, implementation="xla", **options)

    config = changed(sliding_window=window, num_hidden_layers=1, scan_layers=False)
    tokens = random_tokens(config)
    expected = make_model(changed(config, attention_implementation="xla"))(tokens)
    model = make_model(changed(config, attention_implementation="cudnn"))
    monkeypatch.setattr(jax.nn, "dot_product_attention", by_xla)
    got = model(tokens)
    packed = model(tokens, segment_ids=jnp.zeros_like(tokens))
    of_row, of_documents = masks
    assert of_row is None and of_documents.shape == (len(tokens), 1, S, S)
    for hidden in (got, packed):
        np.testing.assert_allclose(hidden, expected, rtol=1e-5, atol=1e-6)


def test_a_program_with_the_window_of_cudnn_has_no_mask(on_gpu, monkeypatch, caplog):
    """0.4 s."""
    on_gpu(A100)
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)

    def program(ids, window):
        bounds = document_bounds(ids, window=5)
        q = jax.ShapeDtypeStruct((2, 136, 2, 64), jnp.bfloat16)
        loss = lambda q: jnp.sum(causal_attention(q, q, q, bounds, None, window=window))
        return jax.jit(jax.grad(loss)).trace(q).lower(lowering_platforms=("cuda",)).as_text()

    one = jnp.zeros((2, 136), jnp.int32)
    with caplog.at_level(logging.WARNING):
        text = program(one, 5)
    assert not caplog.records
    assert text.count("sliding_window_length\\22: 5") == text.count("@__cudnn$") == 2
    assert "136x136" not in text
    assert "136x136" in program(one.at[:, 9:].set(1), None)


@pytest.mark.parametrize(
    ("ids", "length", "head_dim", "chosen"),
    [
        (None, 8192, 128, "mosaic_gpu"),
        (None, 8200, 128, "cudnn"),
        (None, 8200, 64, "mosaic_gpu"),
        (None, 8, 96, "cudnn"),
        (None, 8, 32, "cudnn"),
        (EIGHT_OF_TWO, 8, 96, "mosaic_gpu"),
        (jnp.zeros((1, 8200), jnp.int32), 8200, 128, "mosaic_gpu"),
    ],
    ids=["8192", "8200", "heads of 64", "of 96", "of 32", "documents of 96", "documents"],
)
def test_cudnn_computes_rows_of_one_document_where_it_is_faster(
    on_gpu, calls, ids, length, head_dim, chosen
):
    on_gpu(H100)
    attend(ids, length=length, head_dim=head_dim)
    assert_called(calls[0], ids, chosen)


def test_symbolic_sizes_where_cudnn_takes_them(on_gpu, calls, monkeypatch):
    on_gpu(H100)
    monkeypatch.setattr(attention, "_why_no_cudnn", lambda _: None)
    (s,) = jax.export.symbolic_shape("s")
    q = jax.ShapeDtypeStruct((1, s, 2, 128), jnp.bfloat16)
    jax.eval_shape(lambda q: causal_attention(q, q, q, None, None), q)
    assert_called(calls[0], None, "cudnn")


def test_export_with_symbolic_sizes():
    b, s = jax.export.symbolic_shape("b, s")
    q, k = (jax.ShapeDtypeStruct((b, s, n, 128), jnp.bfloat16) for n in (4, 2))
    attend = lambda q, k: causal_attention(q, k, k, None, None)
    with jax.numpy_dtype_promotion("standard"):  # JAX's attention by XLA needs it in 16 bits
        (out,) = jax.export.export(jax.jit(attend))(q, k).out_avals
    assert out.shape == q.shape


def test_kernels_compute_long_rows_where_cudnn_does_not(on_gpu, calls, monkeypatch):
    on_gpu(H100)
    monkeypatch.setattr(attention, "_why_no_cudnn", lambda _: "it is not here")
    attend(length=8200, head_dim=128)
    assert_called(calls[0], None, "mosaic_gpu")


@pytest.mark.parametrize(
    ("capability", "ids", "head_dim", "reason"),
    [
        (A100, EIGHT_OF_TWO, 16, "wgmma needs compute capability (9, x), a GPU has (8, 0)"),
        (B200, EIGHT_OF_TWO, 16, "wgmma needs compute capability (9, x), a GPU has (10, 0)"),
        (H100, EIGHT_OF_TWO, 256, "heads have 256 numbers; the kernels take up to 128"),
        (H100, TEN_OF_TWO, 16, "rows have 10 tokens; pad them to a multiple of 8"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_elsewhere_cudnn_reads_a_mask_and_the_log_says_so(
    on_gpu, calls, caplog, capability, ids, head_dim, reason
):
    on_gpu(capability)
    with caplog.at_level(logging.WARNING):
        attend(head_dim=head_dim, length=ids.shape[1])
        assert not caplog.records
        for _ in range(2):
            attend(ids, head_dim=head_dim)
    (message,) = caplog.messages
    assert "mask of S² elements" in message and message.endswith(reason)
    assert_called(calls[0], None, "cudnn")
    for call in calls[1:]:
        assert_called(call, ids, "cudnn")


def test_xla_keeps_all_scores_and_the_log_says_so(on_gpu, calls, caplog):
    """Float32, which neither the kernels nor cuDNN take. A choice has one line."""
    on_gpu(H100)
    with caplog.at_level(logging.WARNING):
        attend(EIGHT_OF_TWO, dtype=jnp.float32)
        attend(dtype=jnp.float32)
    (message,) = caplog.messages
    assert "keeps all S² scores, because no kernel of document_attention runs: q, k" in message
    assert "; and cuDNN takes bfloat16 and float16, not float32; set dtype" in message
    assert_called(calls[0], EIGHT_OF_TWO, "xla")
    assert_called(calls[1], None, "xla")


def test_without_a_gpu_xla_computes_it_and_nothing_is_logged(calls, caplog):
    attend(EIGHT_OF_TWO)
    assert_called(calls[0], EIGHT_OF_TWO, "xla")
    assert not caplog.records


def test_kernels_that_do_not_take_the_arrays():
    message = "'mosaic_gpu': rows have 10 tokens; pad them to a multiple of 8"
    with pytest.raises(NotImplementedError, match=message):
        attend(TEN_OF_TWO, implementation="mosaic_gpu")


def test_an_error_of_kernels_that_none_takes_names_no_option(on_gpu, monkeypatch):
    def refuses(*_, **__):
        raise NotImplementedError("no second derivative")

    on_gpu(H100)
    monkeypatch.setattr(attention, "document_attention", refuses)
    with pytest.raises(NotImplementedError, match=r"^no second derivative$"):
        attend(EIGHT_OF_TWO)


@pytest.mark.parametrize("packing", [{}, {"segment_ids": TEN_OF_TWO}], ids=["whole", "packed"])
def test_attention_of_cudnn_where_there_is_none(without_cudnn, packing):
    config = changed(attention_implementation="cudnn", dtype="bfloat16")
    with pytest.raises(
        NotImplementedError,
        match=r"'cudnn': cuDNN is not detected\. Set it to 'xla', or leave it None",
    ):
        hidden_of(config, random_tokens(config, (1, 10)), **packing)


def test_a_gpu_without_cudnn(on_gpu, without_cudnn):
    on_gpu(H100)
    with pytest.raises(NotImplementedError, match=r"'cudnn': cuDNN is not detected\. Set it to"):
        attend(TEN_OF_TWO, implementation="cudnn")
