"""The checks of tensors by the letters of their names, and the form of an operation that runs."""

import re
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from dspark.kernels.dispatch import check, check_counters, form_for
from dspark.kernels.moe import reference

BF16, F32 = torch.bfloat16, torch.float32


def test_letters_are_learnt_given_and_equal_and_a_digit_is_a_size() -> None:
    x_TD, angles_TD2, weight_D = torch.ones(3, 8), torch.ones(3, 4, 2), torch.ones(8)
    sizes = check({"J": 5}, F32, x_TD=x_TD, weight_D=weight_D, bias_D=None)
    assert {letter: sizes[letter] for letter in "JTD"} == {"J": 5, "T": 3, "D": 8}
    assert check(sizes | {"D": 4}, angles_TD2=angles_TD2)["D"] == 4
    assert sizes["D"] == 8, "what was known stays as it was"
    for change in (
        {"x_TD": x_TD[0]},
        {"x_TD": x_TD[None]},
        {"weight_D": weight_D[1:]},
        {"angles_TD2": x_TD[:, :, None]},
    ):
        with pytest.raises(ValueError, match=f"{next(iter(change))}: expected .* found"):
            check({"T": 3, "D": 8}, **change)


def test_the_error_says_what_was_expected_and_found() -> None:
    expected, found = "[C, 8] torch.bfloat16 or torch.float32, contiguous", "[5] torch.float16 with strides (1,)"
    with pytest.raises(ValueError, match=f"^{re.escape(f'weight_CD: expected {expected}, found {found}')}$"):
        check({"D": 8}, BF16, F32, weight_CD=torch.ones(5, dtype=torch.float16))
    says = r"x_TD: expected \[3, 7\] torch.float32, contiguous behind dimension 1, found \[3, 8\]"
    with pytest.raises(ValueError, match=says):
        check({"T": 3, "D": 7}, F32, num_strided=1, x_TD=torch.ones(3, 8))


def test_the_tensors_of_a_check_have_one_of_its_dtypes() -> None:
    narrow, wide = torch.ones(2, dtype=BF16), torch.ones(2)
    check({}, BF16, F32, x_N=wide, y_N=wide)
    check({}, x_N=narrow, y_N=wide)
    for x_N, y_N, name in ((narrow, wide, "y_N"), (wide, narrow, "y_N"), (wide.double(), wide, "x_N")):
        with pytest.raises(ValueError, match=f"^{name}: "):
            check({}, BF16, F32, x_N=x_N, y_N=y_N)


@pytest.mark.parametrize("num_strided", range(5))
def test_strides_are_what_a_view_behind_the_first_dimensions_says(num_strided: int) -> None:
    whole = torch.ones(4, 3, 4, 6)
    views = [whole, *(whole.transpose(i, i + 1) for i in range(3)), *(whole.narrow(i, 0, 0) for i in range(4))]
    views += [whole.narrow(i, 1, 2) for i in range(4)] + [whole.narrow(i, 1, 1) for i in range(4)]
    views += [whole[..., ::2], whole[:, :, :1, :3], whole[:, :1, :, :3], whole[:1].expand(4, -1, -1, -1)]
    for x_THEF in views:
        if not x_THEF.numel() or x_THEF[(0,) * num_strided].is_contiguous():
            check({}, num_strided=num_strided, x_THEF=x_THEF)
        else:
            with pytest.raises(ValueError, match=r"contiguous.*with strides"):
                check({}, num_strided=num_strided, x_THEF=x_THEF)


def test_counters_are_enough_and_a_window_is_short() -> None:
    counters = torch.zeros(3, dtype=torch.int32)
    check_counters(counters, 3)
    check({}, is_window=True, x_TD=torch.ones(16, 2))
    for wrong, least in ((counters, 4), (counters[:0], 1), (counters.long(), 3), (counters[::2], 1)):
        with pytest.raises(ValueError, match=r"^counters_N: expected .* found"):
            check_counters(wrong, least)
    for num_tokens in (0, 17):
        with pytest.raises(ValueError, match=f"^x_TD: expected 1 to 16 tokens, found {num_tokens}$"):
            check({}, is_window=True, x_TD=torch.ones(num_tokens, 2))


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
