from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dspark.kernels.forms import form_for
from dspark.kernels.moe import reference


def test_a_tensor_on_a_cpu_gets_the_reference_and_no_options() -> None:
    assert form_for(torch.zeros(1), reference.up, is_chained=True) is reference.up


@pytest.mark.parametrize(("function", "module"), [(reference.up, "kernel"), (reference.run_each, "grouped")])
def test_a_tensor_on_a_gpu_gets_the_kernel_of_that_name_with_the_options(function: Any, module: str) -> None:
    pytest.importorskip("triton")
    form = cast(
        Any, form_for(cast(Any, SimpleNamespace(is_cuda=True, dtype=torch.float32)), function, module, is_chained=True)
    )
    assert (form.func.__module__, form.func.__name__) == (f"dspark.kernels.moe.{module}", function.__name__)
    assert form.keywords == {"is_chained": True}


def test_float64_gets_the_reference_on_a_gpu_too() -> None:
    assert form_for(cast(Any, SimpleNamespace(is_cuda=True, dtype=torch.float64)), reference.up) is reference.up
