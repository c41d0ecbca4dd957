"""Which library computes the attention of whole sequences, and what is logged or raised."""

import logging

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from models import attention
from models.attention import causal_attention
from models.documents import documents_of
from pallas_kernels import choices
from pallas_kernels.gpu.device import Device
from support.small_llama import changed, hidden_of, random_tokens

A100, H100 = (8, 0), (9, 0)
TEN_OF_TWO = jnp.asarray([[0, 0, 1, 1, 1, 1, 1, 1, 1, 1]], jnp.int32)


@pytest.fixture
def on_gpu(monkeypatch):
    """A function that makes a GPU of a compute capability the default device."""

    def use(capability):
        monkeypatch.setattr(choices, "_logged", set())
        monkeypatch.setattr(attention, "reason_not_here", lambda: None)
        device = Device("a GPU", capability, 132)
        monkeypatch.setattr(attention, "target_device", lambda: device)

    return use


@pytest.fixture
def without_cudnn(monkeypatch):
    """The machine has no cuDNN."""
    monkeypatch.setattr(fused_attention_stablehlo, "cuda_versions", None)


@pytest.fixture
def calls(monkeypatch):
    """The attention that was called: the mask and the implementation, or "packed"."""
    made = []

    def whole(q, k, v, *, mask=None, is_causal, implementation):
        assert is_causal
        made.append((None if mask is None else np.asarray(mask), implementation))
        return q

    def packed(q, k, v, documents):
        made.append("packed")
        return q

    monkeypatch.setattr(attention.jax.nn, "dot_product_attention", whole)
    monkeypatch.setattr(attention, "packed_attention", packed)
    return made


def attend(ids=None, *, implementation=None, shape=(1, 10, 2, 16), dtype=jnp.bfloat16):
    q = jnp.ones(shape, dtype)
    documents = None if ids is None else documents_of(ids)
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


@pytest.mark.parametrize("implementation", [None, "cudnn"])
@pytest.mark.parametrize("capability", [H100, (10, 0)], ids=str)
def test_each_document_by_itself_from_hopper_on(on_gpu, calls, caplog, capability, implementation):
    on_gpu(capability)
    attend(TEN_OF_TWO, implementation=implementation)
    attend(implementation=implementation)
    assert calls == ["packed", (None, "cudnn")] and not caplog.records


@pytest.mark.parametrize("implementation", [None, "cudnn"])
def test_before_hopper_cudnn_reads_a_mask_and_the_log_says_so(
    on_gpu, calls, caplog, implementation
):
    on_gpu(A100)
    with caplog.at_level(logging.WARNING):
        attend(implementation=implementation)
        assert not caplog.records
        for _ in range(2):
            attend(TEN_OF_TWO, implementation=implementation)
    (message,) = caplog.messages
    assert "mask of S² elements" in message and "from compute capability (9, 0) on" in message
    assert len(calls) == 3
    for mask, by in calls[1:]:
        row = np.asarray(TEN_OF_TWO[0])
        np.testing.assert_array_equal(mask, (row[:, None] == row)[None, None])
        assert by == "cudnn"


def test_xla_keeps_all_scores_and_the_log_says_so(on_gpu, calls, caplog):
    on_gpu(H100)
    with caplog.at_level(logging.WARNING):
        attend(TEN_OF_TWO, dtype=jnp.float32)
        attend(dtype=jnp.float32)
    (message,) = caplog.messages
    assert "keeps all S² scores, because cuDNN takes bfloat16 and float16" in message
    assert [by for _, by in calls] == ["xla", "xla"]


def test_without_a_gpu_xla_computes_it_and_nothing_is_logged(calls, caplog):
    attend(TEN_OF_TWO)
    assert [by for _, by in calls] == ["xla"] and not caplog.records


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
