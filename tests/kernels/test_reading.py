"""The bandwidth kernel reads every integer once."""

import pytest
import torch

from dspark.kernels.reading import read_sums


@pytest.mark.parametrize(("num_blocks", "num_programs"), [(1, 4), (7, 3), (12, 4)])
def test_every_integer_is_read_once(num_blocks: int, num_programs: int, kernel_device: torch.device) -> None:
    x_N = torch.randint(-1000, 1000, (num_blocks * 256,), generator=torch.Generator().manual_seed(0))
    found_P = read_sums(x_N.to(kernel_device, torch.int32), 256, num_programs).tolist()
    blocks = x_N.view(-1, 256).sum(1).tolist()
    assert found_P == [sum(blocks[program::num_programs]) for program in range(num_programs)]


def test_other_lengths_and_dtypes_are_refused() -> None:
    for x_N in (torch.zeros(300, dtype=torch.int32), torch.zeros(256)):
        with pytest.raises(ValueError, match=r"x_N: expected .*found"):
            read_sums(x_N, 256, 1)
