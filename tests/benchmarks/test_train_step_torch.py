"""Names of the variants that PyTorch's step knows. The step itself needs PyTorch and a GPU."""

import pytest

from benchmarks.training.train_step_torch import options_of


def test_options_of_a_variant():
    assert options_of("liger") == ("liger", {})
    name = "liger_loss:compile:fp8=rowwise"
    assert options_of(name) == ("liger_loss", {"compile": "", "fp8": "rowwise"})


@pytest.mark.parametrize("name", ["torch", "liger:compiled", "huggingface:full:fp16=x"])
def test_unknown_parts_are_refused(name):
    with pytest.raises(ValueError, match=f"variant '{name}' must be one of huggingface, liger"):
        options_of(name)
