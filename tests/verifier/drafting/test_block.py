"""A draft on the engine's kernels says what the plain draft says, whatever was accepted before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_tiny_ling
from toy import chi_square_p_value
from verifying import Pair, random_ids

from dspark.config import DraftConfig
from dspark.decode.sampling import Sampling, token_probs
from dspark.draft.model import DraftModel
from dspark.draft.proposal import ContextCache, extend, propose
from dspark.errors import DraftMismatchError
from dspark.kernels import block_attention, markov, moe, projection, residual
from dspark.kernels.block_attention import kernel as block_attention_kernel
from dspark.kernels.markov import kernel as markov_kernel
from dspark.kernels.moe import kernel as moe_kernel
from dspark.kernels.projection import kernel as projection_kernel
from dspark.kernels.residual import kernel as residual_kernel
from dspark.target.loading import NANO_FOLDER
from dspark.types import Proposal, TargetOutput
from dspark.verifier import Shard, Verifier, load_weights
from dspark.verifier.blocks import Window
from dspark.verifier.calls import call
from dspark.verifier.drafting import BlockDrafter, Drafts, Sampler, block, draft_weights

KERNELS = [
    (block_attention, block_attention_kernel, ("write", "attend", "merge")),
    (markov, markov_kernel, ("step",)),
    (moe, moe_kernel, ("up", "down")),
    (projection, projection_kernel, ("project",)),
    (residual, residual_kernel, ("embed_norm",)),
]
HEADS = {"num_key_value_heads": 2}
FIELDS = [{}, HEADS, {"markov_head_type": "gated"}, {"markov_head_type": "rnn", "confidence_head_with_markov": False}]


def window_of(drafter: BlockDrafter, num_tokens: int, seed: int, good: int) -> Window:
    """Random taps, NaN from the row ``good`` on."""
    config = drafter.weights.config
    shape = (num_tokens, len(config.target_layer_ids), config.hidden_size)
    taps_TLD = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    taps_TLD[good:] = torch.nan
    return Window(taps_TLD.to(drafter.verifier.weights.device), taps_TLD[:, 0], None)


def update(drafter: BlockDrafter, window: Window, count: int) -> None:
    """As a cycle does: the verifier's length grows, then the drafter is told."""
    length_1 = drafter.verifier.buffers.length_1
    start_1 = length_1.clone()
    length_1.add_(count)
    drafter.update(window, start_1, torch.full_like(start_1, count), call)


def filled(drafter: BlockDrafter, draft: DraftModel, counts: tuple[int, ...]) -> ContextCache:
    """Both contexts after windows of which so many tokens were committed, with drafting in between."""
    context = ContextCache(draft)
    drafter.verifier.buffers.length_1.zero_()
    for seed, count in enumerate(counts):
        num_tokens = 16 if seed == 0 else 9
        window = window_of(drafter, num_tokens, seed, count)
        update(drafter, window, count)
        extend(draft, context, window.taps_TLD[:count])
        drafter.draft(None, call)
    return context


def greedy(draft: DraftModel, context: ContextCache, anchor_id: int) -> Proposal:
    return propose(draft, context, anchor_id, lambda logits_V: int(logits_V.argmax()))


@torch.no_grad()
@pytest.mark.parametrize("fields", [None, *FIELDS], ids=str)
def test_drafts_and_confidences_are_the_plain_drafts(
    fields: dict[str, Any] | None,
    draft: DraftModel,
    random_draft: Callable[..., DraftModel],
    drafter_of: Callable[..., BlockDrafter],
) -> None:
    draft = draft if fields is None else random_draft(**fields)
    drafter = drafter_of(draft)
    ids_T = drafter.verifier.ids_T
    for seed in range(4):
        context = filled(drafter, draft, (3 + 2 * seed, 1, 4)[: seed or None])
        for anchor_id in random_ids(4096, 3, seed).tolist():
            expected = greedy(draft, context, anchor_id)
            ids_T[:] = torch.tensor([anchor_id, *[-1] * 15])
            drafts = drafter.draft(None, call)
            assert ids_T.tolist() == [anchor_id, *expected.ids_K.tolist(), *[-1] * 7]
            torch.testing.assert_close(drafts.confidence_K, expected.confidence_logits_K, rtol=1e-3, atol=1e-3)
            assert drafts.logits_KV is None


@torch.no_grad()
def test_a_narrower_window_verifies_the_first_tokens_of_the_same_block(
    draft: DraftModel, drafter_of: Callable[..., BlockDrafter]
) -> None:
    found = []
    for num_drafts in (8, 5, 1):
        drafter = drafter_of(draft, num_drafts)
        filled(drafter, draft, (11, 2))
        drafter.verifier.ids_T[:] = torch.tensor([77, *[-1] * 15])
        confidence_K = drafter.draft(None, call).confidence_K
        assert confidence_K is not None
        found.append((drafter.verifier.ids_T.tolist(), confidence_K))
        assert found[-1][0] == [*found[0][0][: 1 + num_drafts], *[-1] * (15 - num_drafts)]
        torch.testing.assert_close(confidence_K, found[0][1][:num_drafts])


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_the_context_is_the_plain_drafts_after_any_counts(
    seed: int, draft: DraftModel, drafter_of: Callable[..., BlockDrafter]
) -> None:
    drafter = drafter_of(draft)
    counts = (torch.randperm(9, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    context = filled(drafter, draft, (16, *counts))
    length = int(drafter.verifier.buffers.length_1)
    assert context.num_tokens == length == 16 + sum(range(1, 10))
    for ours_LHJE, theirs in ((drafter.keys_LHJE, context.keys), (drafter.values_LHJE, context.values)):
        for layer, rows in enumerate(theirs):
            torch.testing.assert_close(
                ours_LHJE[layer, :, :length], rows[:length].transpose(0, 1), rtol=1e-4, atol=1e-4
            )


@torch.no_grad()
@pytest.mark.parametrize("num_rows", [1, 16, 40])
def test_a_prompt_taken_in_at_once_is_the_prompt_window_by_window(
    num_rows: int, draft: DraftModel, drafter_of: Callable[..., BlockDrafter], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block, "PIECE_TOKENS", 16)
    slow, fast = drafter_of(draft), drafter_of(draft)
    taps_NLD = window_of(slow, num_rows, 0, num_rows).taps_TLD
    for taps_TLD in torch.split(taps_NLD, 16):
        update(slow, Window(taps_TLD, taps_TLD[:, 0], None), len(taps_TLD))
    fast.begin(torch.zeros(num_rows, dtype=torch.int64), TargetOutput(taps_NLD, taps_NLD[:, 0]))
    for found, expected in ((fast.keys_LHJE, slow.keys_LHJE), (fast.values_LHJE, slow.values_LHJE)):
        torch.testing.assert_close(found[:, :, :num_rows], expected[:, :, :num_rows], rtol=1e-4, atol=1e-4)
        assert found[:, :, num_rows:].isnan().all()


@torch.no_grad()
def test_what_an_update_leaves_behind_the_committed_rows_is_never_read(
    draft: DraftModel, drafter_of: Callable[..., BlockDrafter]
) -> None:
    drafter = drafter_of(draft)
    filled(drafter, draft, (5, 3))
    expected = drafter.draft(None, call).confidence_K
    for memory in (drafter.keys_LHJE, drafter.values_LHJE):
        memory[:, :, int(drafter.verifier.buffers.length_1) :] = torch.nan
    found = drafter.draft(None, call).confidence_K
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


@torch.no_grad()
@pytest.mark.parametrize("head", ["vanilla", "rnn"])
def test_sampled_drafts_follow_the_logits_that_are_kept(
    head: str, random_draft: Callable[..., DraftModel], drafter_of: Callable[..., BlockDrafter]
) -> None:
    draft = random_draft(markov_head_type=head)
    drafter = drafter_of(draft, 2)
    context = filled(drafter, draft, (7,))
    temperature, device = 0.4, drafter.verifier.weights.device
    generator = torch.Generator(device).manual_seed(0)
    sampler = Sampler(torch.full((1,), 1 / temperature, device=device), generator)
    counts_V, probs_V = torch.zeros(4096, dtype=torch.int64), None
    for _ in range(150):
        drafter.verifier.ids_T[0] = 5
        logits_KV = drafter.draft(sampler, call).logits_KV
        assert logits_KV is not None
        first_id, second_id = drafter.verifier.ids_T[1:3].tolist()
        ids = iter((first_id, second_id, *[0] * 6))
        expected_KV = propose(draft, context, 5, lambda _: next(ids)).logits_KV  # noqa: B023
        torch.testing.assert_close(logits_KV, expected_KV[:2], rtol=1e-3, atol=1e-3)
        counts_V[first_id] += 1
        probs_V = token_probs(logits_KV[0].cpu(), Sampling(temperature, 1))
    assert probs_V is not None
    assert counts_V.count_nonzero() > 10
    assert chi_square_p_value(counts_V, probs_V) > 1e-3


@torch.no_grad()
@pytest.mark.parametrize("is_greedy", [True, False])
def test_drafts_on_kernels_are_the_plain_drafts(
    is_greedy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel_device: torch.device
) -> None:
    for public, kernel, names in KERNELS:
        for name in names:
            monkeypatch.setattr(public, name, getattr(kernel, name))
    verifier = Verifier.load(write_tiny_ling(tmp_path, num_hidden_layers=3), 112, (0, 1), torch.float32, kernel_device)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    widths = {"intermediate_size": 24, "max_position_embeddings": 64, "markov_rank": 12, "block_size": 4}
    target = {"vocab_size": verifier.vocab_size, "hidden_size": 32, "num_target_layers": 3, "target_layer_ids": (0, 1)}
    draft = DraftModel(DraftConfig(**(shape | widths | target), mask_token_id=3)).to(kernel_device)
    generator = torch.Generator().manual_seed(0)
    for weight in draft.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    draft.bind(verifier.embedding_VD, verifier.head_VD)
    weights = draft_weights(draft, Shard(), torch.float32, kernel_device)
    drafter = BlockDrafter(verifier, weights, 3)
    drafter.keys_LHJE.fill_(torch.nan)
    drafter.values_LHJE.fill_(torch.nan)
    context = filled(drafter, draft, (16, *[9] * 6, 4))
    verifier.ids_T[0] = 7
    inverse_1 = torch.full((1,), 2.0, device=kernel_device)
    found = drafter.draft(None if is_greedy else Sampler(inverse_1, None), call)
    ids = iter((*verifier.ids_T[1:4].tolist(), 0))
    expected = propose(draft, context, 7, lambda logits_V: int(logits_V.argmax()) if is_greedy else next(ids))
    assert verifier.ids_T[1:4].tolist() == expected.ids_K[:3].tolist()
    assert found.confidence_K is not None
    torch.testing.assert_close(found.confidence_K, expected.confidence_logits_K[:3], rtol=1e-4, atol=1e-4)
    if not is_greedy:
        torch.testing.assert_close(found.logits_KV, expected.logits_KV[:3], rtol=1e-4, atol=1e-4)
    assert not verifier.buffers.counters.any()


@pytest.mark.skipif(torch.cuda.is_available(), reason="two ranks in two threads, on the CPU")
@pytest.mark.parametrize("is_greedy", [True, False])
def test_two_ranks_draft_what_one_drafts(
    is_greedy: bool, draft: DraftModel, drafter_of: Callable[..., BlockDrafter]
) -> None:
    def run(drafter: BlockDrafter) -> tuple[list[int], Drafts]:
        inverse_1, generator = torch.full((1,), 2.0), torch.Generator().manual_seed(3)
        with torch.no_grad():
            update(drafter, window_of(drafter, 16, 0, 13), 13)
            drafter.verifier.ids_T[0] = 99
            drafts = drafter.draft(None if is_greedy else Sampler(inverse_1, generator), call)
        return drafter.verifier.ids_T.tolist(), drafts

    expected = run(drafter_of(draft))
    pair, drafters = Pair(), []
    for rank in range(2):
        shard = Shard(rank, 2)
        verifier = Verifier(load_weights(NANO_FOLDER, shard, torch.float32), 64, draft.config.target_layer_ids)
        verifier.ranks = pair
        drafters.append(BlockDrafter(verifier, draft_weights(draft, shard, torch.float32), 8))
    for ids, drafts in pair.run(lambda rank: run(drafters[rank])):
        assert ids == expected[0]
        for ours, theirs in zip(drafts, expected[1], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_a_draft_of_another_target_or_a_window_that_is_not_there_is_refused(
    draft: DraftModel, random_draft: Callable[..., DraftModel], drafter_of: Callable[..., BlockDrafter]
) -> None:
    with pytest.raises(DraftMismatchError, match=r"\(1, 2, 4, 5\).*\(1, 2, 4, 5, 6\)"):
        drafter_of(random_draft(target_layer_ids=(1, 2, 4, 5)))
    for num_drafts in (0, 9):
        with pytest.raises(DraftMismatchError, match=f"found {num_drafts} of block_size 8"):
            drafter_of(draft, num_drafts)
    with pytest.raises(DraftMismatchError, match="at most 15"):
        drafter_of(random_draft(block_size=16))
    for changes in ({"own_tables": True}, {"sample_from_anchor": False}):
        with pytest.raises(DraftMismatchError, match="give --engine reference"):
            drafter_of(random_draft(**changes))
