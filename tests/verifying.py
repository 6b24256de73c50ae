"""What the verifier's tests share."""

import torch

CAPACITY_TOKENS = 256


def random_ids(vocab_size: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed))
