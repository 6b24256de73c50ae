"""Verify then commit against decoding one token after the other, for every number of committed tokens."""

from collections.abc import Sequence
from typing import Any

import torch

from dspark.types import Target


def decode_one_by_one(
    target: Target[Any], prompt_T: torch.Tensor, drafts_T: torch.Tensor, next_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states of the drafts decoded singly, and that of ``next_id`` after each count of them."""
    cache, _ = target.prefill([prompt_T])
    drafted, following = [], []
    for token in [*drafts_T.tolist(), None]:
        following.append(target.verify(torch.tensor([[next_id]]), cache).last_hidden_ND[0])
        if token is not None:
            drafted.append(target.verify(torch.tensor([[token]]), cache).last_hidden_ND[0])
            target.commit(cache, torch.tensor([1]))
    return torch.stack(drafted), torch.stack(following)


@torch.no_grad()
def assert_every_count_agrees(
    target: Target[Any], prompts: Sequence[torch.Tensor], drafts_BT: torch.Tensor, next_id: int = 1
) -> None:
    """Three prompts in one cache, with different counts each time, to 1e-5."""
    num_tokens = drafts_BT.shape[1]
    singly = [decode_one_by_one(target, *row, next_id) for row in zip(prompts, drafts_BT, strict=True)]
    for counts in {(n, num_tokens - n, n // 2) for n in range(num_tokens + 1)}:
        cache, _ = target.prefill(prompts)
        target.verify(drafts_BT.flip(1), cache)  # a stage that is replaced
        staged_BTD = target.verify(drafts_BT, cache).last_hidden_ND.unflatten(0, (3, num_tokens))
        target.commit(cache, torch.tensor(counts))
        after_BD = target.verify(torch.full((3, 1), next_id), cache).last_hidden_ND
        for row, (drafted_TD, following_TD) in enumerate(singly):
            torch.testing.assert_close(staged_BTD[row], drafted_TD, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(after_BD[row], following_TD[counts[row]], rtol=1e-5, atol=1e-5)
