"""RMSNorm against the golden numbers."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dspark.layers.rms_norm import RMSNorm


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_rms_norm_adds_eps_under_the_root(ling_golden: dict, dtype: torch.dtype, rtol: float) -> None:
    case = ling_golden["rmsnorm"]
    norm = RMSNorm(8, case["eps"]).to(dtype)
    norm.weight.data = torch.tensor(case["weight"], dtype=dtype)
    y = norm(torch.tensor(case["x"], dtype=dtype)).double()
    torch.testing.assert_close(y, torch.tensor(case["y"], dtype=torch.float64), rtol=rtol, atol=1e-6 * (rtol > 1e-9))
    assert (y - torch.tensor(case["y_wrong_eps_outside_sqrt"])).abs().max() > 1e-2


def test_statistics_of_bfloat16_are_float32() -> None:
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).bfloat16()
    y = RMSNorm(512, 1e-6).bfloat16()(x)
    assert torch.equal(y, RMSNorm(512, 1e-6)(x.float()).bfloat16())


def test_the_dtype_stays_under_a_gpus_autocast_too() -> None:
    """Some versions of torch have the norm in float32 there, and the values beside its keys in bfloat16."""
    norm = RMSNorm(16, 1e-6)
    del norm._parameters["weight"]
    with FakeTensorMode(), torch.no_grad():
        x_NE, norm.weight = torch.empty(3, 16, device="cuda", dtype=torch.bfloat16), torch.empty(16, device="cuda")
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.set_autocast_enabled("cuda", True)
        try:
            assert norm(x_NE).dtype == torch.bfloat16
        finally:
            torch.set_autocast_enabled("cuda", False)
