"""The engine on its Triton kernels, in the interpreter, is the plain target too: what a GPU runs, on small shapes."""

from pathlib import Path

import pytest
import torch
from tiny import write_tiny_ling
from verifying import random_ids

from dspark.kernels import head, kda, mla, moe, projection, residual, router
from dspark.kernels.head import kernel as head_kernel
from dspark.kernels.kda import kernel as kda_kernel
from dspark.kernels.mla import kernel as mla_kernel
from dspark.kernels.moe import kernel as moe_kernel
from dspark.kernels.projection import kernel as projection_kernel
from dspark.kernels.residual import kernel as residual_kernel
from dspark.kernels.router import kernel as router_kernel
from dspark.target.loading import load_target
from dspark.verifier import Step, Verifier

KERNELS = [
    (head, head_kernel, ("greedy", "accept")),
    (kda, kda_kernel, ("verify", "commit")),
    (mla, mla_kernel, ("absorb", "attend", "finish")),
    (moe, moe_kernel, ("up", "down")),
    (projection, projection_kernel, ("project", "project_gated", "project_prepared")),
    (residual, residual_kernel, ("add_norm", "embed_norm")),
    (router, router_kernel, ("dispatch",)),
]


@torch.no_grad()
def test_steps_and_commits_on_kernels_equal_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> None:
    for public, kernel, names in KERNELS:
        for name in names:
            monkeypatch.setattr(public, name, getattr(kernel, name))
    limits = {"expert_swiglu_limit_list": [0, 0, 0.5], "share_expert_swiglu_limit_list": [0, 0.25, 0.5]}
    folder = write_tiny_ling(tmp_path, num_hidden_layers=3, **limits)
    target = load_target(folder, target_layer_ids=(1,), device=kernel_device)
    verifier = Verifier.load(folder, 64, (1,), torch.float32, kernel_device)
    ids_T = random_ids(target.vocab_size, 10).to(kernel_device)
    verifier.prefill([ids_T[:4]])
    cache, _ = target.prefill([ids_T[:4]])
    for place in (5, 6):  # two drafted tokens are the target's own
        output = target.verify(ids_T[None, 4:place], cache)
        ids_T[place] = target.logits(output.last_hidden_ND[-1]).argmax()
    step = Step(verifier, 6)
    step.verifier.ids_T[: step.num_tokens].copy_(ids_T[4:])
    taken, expected = step(), target.verify(ids_T[None, 4:], cache)
    torch.testing.assert_close(taken.hidden_TD, expected.last_hidden_ND, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(taken.taps_TLD, expected.taps_NLD, rtol=1e-4, atol=1e-4)
    choices = target.logits(expected.last_hidden_ND).argmax(-1)
    kept = (ids_T[5:] == choices[:-1]).long().cumprod(0).sum() + 1
    assert int(taken.count_1) == int(kept) >= 3
    assert int(taken.next_id_1) == int(choices[kept - 1])
    assert not verifier.buffers.counters.any()
    target.commit(cache, kept[None])
    torch.testing.assert_close(
        verifier.buffers.state_LHEF, torch.stack([state_BHEF[0] for state_BHEF in cache.states]), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(verifier.buffers.history_LWC, cache.histories_MBWC[:, 0], rtol=1e-4, atol=1e-5)
