"""The engine of one rank is the plain target: prefill, verify, commit for every count, taps, generated texts."""

from pathlib import Path

import pytest
import torch
from speculating import speculate
from verifying import CAPACITY_TOKENS, random_ids

from dspark.decode.generation import generate
from dspark.decode.sampling import Sampling
from dspark.errors import ConfigError
from dspark.export.draft_folder import check_target, read_draft
from dspark.target.loading import NANO_FOLDER, load_target, target_facts
from dspark.target.model import LingModel
from dspark.types import TargetOutput
from dspark.verifier import Verifier

WINDOW = 9


def assert_same(ours: TargetOutput, theirs: TargetOutput) -> None:
    for x, y in ((ours.taps_NLD, theirs.taps_NLD), (ours.last_hidden_ND, theirs.last_hidden_ND)):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("length", [1, 2, 16, 37])
def test_prefill_and_verify_give_the_targets_taps_and_hidden_states(
    verifier: Verifier, target: LingModel, length: int
) -> None:
    ids_T = random_ids(target.vocab_size, length + WINDOW)
    our_cache, ours = verifier.prefill([ids_T[:length]])
    their_cache, theirs = target.prefill([ids_T[:length]])
    assert ours.taps_NLD.shape == (length, 2, target.hidden_size)
    assert_same(ours, theirs)
    assert_same(verifier.verify(ids_T[None, length:], our_cache), target.verify(ids_T[None, length:], their_cache))
    logits_NV, expected_NV = (model.logits(theirs.last_hidden_ND) for model in (verifier, target))
    torch.testing.assert_close(logits_NV, expected_NV, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_verify_then_commit_equals_the_target_for_every_count(verifier: Verifier, target: LingModel) -> None:
    prompt_T, window_T = random_ids(target.vocab_size, 21), random_ids(target.vocab_size, WINDOW, seed=1)
    for count in range(WINDOW + 1):
        outputs = []
        for model in (verifier, target):
            cache, _ = model.prefill([prompt_T])
            model.verify(window_T.flip(0)[None], cache)  # a stage that is replaced
            model.verify(window_T[None], cache)
            model.commit(cache, torch.tensor([count]))
            outputs.append(model.verify(torch.tensor([[1, 2]]), cache))
        assert_same(*outputs)


@torch.no_grad()
def test_verify_then_commit_equals_decoding_one_by_one(verifier: Verifier) -> None:
    prompt_T, window_T = random_ids(verifier.vocab_size, 5), random_ids(verifier.vocab_size, WINDOW, seed=1)
    cache, _ = verifier.prefill([prompt_T])
    states = []
    for token in window_T:
        verifier.verify(token[None, None], cache)
        verifier.commit(cache, torch.tensor([1]))
        states.append([tensor.clone() for tensor in verifier.buffers.memory()])
    for count, expected in enumerate(states, start=1):
        cache, _ = verifier.prefill([prompt_T])
        verifier.verify(window_T[None], cache)
        verifier.commit(cache, torch.tensor([count]))
        for ours, theirs in zip(verifier.buffers.memory(), expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_greedy_text_is_the_targets(verifier: Verifier, target: LingModel) -> None:
    prompt_T, sampling = random_ids(target.vocab_size, 12), Sampling(0.0, 64)
    ours, theirs = (generate(model, [prompt_T], sampling, [lambda: 0.0])[0] for model in (verifier, target))
    assert len(ours) == 64
    assert ours.tolist() == theirs.tolist()


@torch.no_grad()
def test_speculative_text_and_rounds_are_the_targets(kernel_device: torch.device) -> None:
    folder, sampling = NANO_FOLDER, Sampling(0.0, 64)
    layers = read_draft_layers()
    found = []
    for kind in (Verifier, LingModel):
        if kind is Verifier:
            model = Verifier.load(folder, CAPACITY_TOKENS, layers, torch.float32, kernel_device)
        else:
            model = load_target(folder, target_layer_ids=layers, device=kernel_device)
        draft = read_draft(folder / "draft", (model.embedding_VD, model.head_VD), device=kernel_device)
        found.append(speculate(model, draft, random_ids(model.vocab_size, 20), sampling, lambda: 0.5))
    ours, theirs = found
    assert ours.ids_T.tolist() == theirs.ids_T.tolist()
    assert [r.acceptance_length for r in ours.rounds] == [r.acceptance_length for r in theirs.rounds]


def read_draft_layers() -> tuple[int, ...]:
    facts = target_facts(NANO_FOLDER)
    sizes = {"vocab_size": facts.vocab_size, "hidden_size": facts.hidden_size, "num_layers": facts.num_layers}
    return check_target(NANO_FOLDER / "draft", **sizes).target_layer_ids


@torch.no_grad()
def test_a_bfloat16_engine_stays_near_the_float32_target(kernel_device: torch.device) -> None:
    target = load_target(NANO_FOLDER, device=kernel_device)
    verifier = Verifier.load(NANO_FOLDER, CAPACITY_TOKENS, (), torch.bfloat16, kernel_device)
    ids_T = random_ids(target.vocab_size, 40)
    expected_ND = target.prefill([ids_T])[1].last_hidden_ND
    found_ND = verifier.prefill([ids_T])[1].last_hidden_ND
    assert (found_ND.dtype, verifier.buffers.state_LHEF.dtype) == (torch.bfloat16, torch.float32)
    errors_N = (found_ND.float() - expected_ND).norm(dim=1) / expected_ND.norm(dim=1)
    assert errors_N.median() < 0.05


@torch.no_grad()
def test_what_the_engine_cannot_hold_is_refused(verifier: Verifier) -> None:
    one_T = random_ids(verifier.vocab_size, 3)
    with pytest.raises(ConfigError, match="one sequence at a time, got 2"):
        verifier.prefill([one_T, one_T])
    cache, _ = verifier.prefill([one_T])
    with pytest.raises(ConfigError, match="1 to 16 tokens at a time, got 17"):
        verifier.verify(torch.zeros(1, 17, dtype=torch.int64), cache)
    with pytest.raises(ConfigError, match="one sequence at a time, got 2"):
        verifier.verify(torch.zeros(2, 1, dtype=torch.int64), cache)
    with pytest.raises(ConfigError, match="room for 256 tokens and holds 0: 257 more"):
        verifier.prefill([random_ids(verifier.vocab_size, CAPACITY_TOKENS + 1)])
    full, _ = verifier.prefill([random_ids(verifier.vocab_size, CAPACITY_TOKENS)])
    with pytest.raises(ConfigError, match="room for 256 tokens and holds 256: 3 more"):
        verifier.verify(one_T[None], full)
    with pytest.raises(ValueError, match="was replaced"):
        verifier.verify(one_T[None], cache)
    cache, _ = verifier.prefill([one_T])
    verifier.verify(one_T[None], cache)
    for counts in ([4], [-1], [1, 1]):
        with pytest.raises(ValueError, match=r"in 0\.\.3"):
            verifier.commit(cache, torch.tensor(counts))
    verifier.commit(cache, torch.tensor([2]))
    with pytest.raises(ValueError, match=r"in 0\.\.0"):
        verifier.commit(cache, torch.tensor([1]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels' promise; the references' products depend on T")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@torch.no_grad()
def test_a_window_and_its_tokens_one_by_one_agree_bit_for_bit(
    folder: Path, dtype: torch.dtype, kernel_device: torch.device
) -> None:
    verifier = Verifier.load(folder, CAPACITY_TOKENS, (3, 0), dtype, kernel_device)
    prompt_T, window_T = random_ids(verifier.vocab_size, 21), random_ids(verifier.vocab_size, WINDOW, seed=1)
    cache, _ = verifier.prefill([prompt_T])
    together = verifier.verify(window_T[None], cache)
    verifier.commit(cache, torch.tensor([WINDOW]))
    expected = [tensor.clone() for tensor in (*verifier.buffers.memory(), verifier.buffers.rows_MJC)]
    cache, _ = verifier.prefill([prompt_T])
    for place, token in enumerate(window_T):
        alone = verifier.verify(token[None, None], cache)
        verifier.commit(cache, torch.tensor([1]))
        assert torch.equal(alone.last_hidden_ND[0], together.last_hidden_ND[place]), place
        assert torch.equal(alone.taps_NLD[0], together.taps_NLD[place]), place
    num_rows = len(prompt_T) + WINDOW
    for ours, theirs in zip((*verifier.buffers.memory(), verifier.buffers.rows_MJC), expected, strict=True):
        same = (ours[:, :num_rows], theirs[:, :num_rows]) if ours is verifier.buffers.rows_MJC else (ours, theirs)
        assert torch.equal(*same)


@pytest.mark.parametrize("layers", [(-1,), (1, 1), (99,)])
def test_tapped_layers_that_are_not_there_are_refused(verifier: Verifier, layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="target_layer_ids must be distinct and in 0"):
        Verifier(verifier.weights, CAPACITY_TOKENS, layers)


@torch.no_grad()
@pytest.mark.parametrize("length", [3, 20])
def test_ids_that_are_none_of_the_targets_are_refused_and_the_sequence_stays(verifier: Verifier, length: int) -> None:
    cache, _ = verifier.prefill([random_ids(verifier.vocab_size, 11)])
    good_T = random_ids(verifier.vocab_size, length)
    wrong = (good_T - verifier.vocab_size, good_T + verifier.vocab_size, good_T + 0.7, good_T > 3)
    for ids_T in (*wrong, good_T[:0], good_T[None]):
        with pytest.raises(ConfigError, match="token id"):
            verifier.prefill([ids_T])
    for ids_T in wrong:
        with pytest.raises(ConfigError, match="token id"):
            verifier.verify(ids_T[None, :3], cache)
    verifier.verify(good_T[None, :3], cache)
    verifier.commit(cache, torch.tensor([3]))
    assert int(verifier.buffers.length_1) == 14
