"""The device-resident step commits what the target would have said, whatever was drafted."""

import pytest
import torch
from verifying import CAPACITY_TOKENS, random_ids

from dspark.decode.generation import generate
from dspark.decode.sampling import Sampling
from dspark.errors import ConfigError
from dspark.target.model import LingModel
from dspark.verifier import Step, Verifier

NEW_TOKENS = 64


def decode(verifier: Verifier, prompt_T: torch.Tensor, draft: list[list[int]], num_tokens: int) -> list[int]:
    """The text of steps of ``num_tokens``; ``draft`` holds what is drafted for a text of each length."""
    _, output = verifier.prefill([prompt_T])
    text = verifier.logits(output.last_hidden_ND[-1:]).argmax(-1).tolist()
    step = Step(verifier, num_tokens)
    while len(text) < NEW_TOKENS:
        step.verifier.ids_T[: step.num_tokens].copy_(torch.tensor([text[-1], *draft[len(text)]]))
        output = step()
        window, count = step.verifier.ids_T[: step.num_tokens].tolist(), int(output.count_1)
        assert window[0] == int(output.next_id_1)
        text += [*window[1:count], window[0]]
        assert int(verifier.buffers.length_1) == len(prompt_T) + len(text) - 1
    return text[:NEW_TOKENS]


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 4, 9])
def test_steps_commit_the_targets_greedy_text(verifier: Verifier, target: LingModel, num_tokens: int) -> None:
    prompt_T = random_ids(target.vocab_size, 11)
    (expected_T,) = generate(target, [prompt_T], Sampling(0.0, NEW_TOKENS + 20), [lambda: 0.0])
    expected = expected_T.tolist()
    random = torch.Generator().manual_seed(0)
    drafts = []
    for length in range(NEW_TOKENS + 1):  # right up to a random place, wrong there
        good = int(torch.randint(num_tokens + 1, (), generator=random))
        drafted = expected[length : length + num_tokens - 1]
        if good < len(drafted):
            drafted[good] = (drafted[good] + 1) % target.vocab_size
        drafts.append(drafted)
    assert decode(verifier, prompt_T, drafts, num_tokens) == expected[:NEW_TOKENS]


@torch.no_grad()
def test_a_step_feeds_the_next_one(verifier: Verifier, target: LingModel) -> None:
    prompt_T = random_ids(target.vocab_size, 11)
    (expected_T,) = generate(target, [prompt_T], Sampling(0.0, 20), [lambda: 0.0])
    verifier.prefill([prompt_T])
    step = Step(verifier, 1)
    step.verifier.ids_T[: step.num_tokens].copy_(expected_T[:1])
    ids = [int(expected_T[0]), *(int(step().next_id_1) for _ in range(19))]
    assert ids == expected_T.tolist()


@torch.no_grad()
def test_steps_stop_at_the_capacity(verifier: Verifier) -> None:
    verifier.prefill([random_ids(verifier.vocab_size, CAPACITY_TOKENS - 4)])
    step = Step(verifier, 2)
    step()
    step()
    with pytest.raises(ConfigError, match="room for 256 tokens"):
        list(map(Step.__call__, [step] * 3))


@torch.no_grad()
def test_a_step_drops_what_was_staged_before_it(verifier: Verifier) -> None:
    cache, _ = verifier.prefill([random_ids(verifier.vocab_size, 5)])
    step = Step(verifier, 2)
    verifier.verify(random_ids(verifier.vocab_size, 3)[None], cache)
    step()
    with pytest.raises(ValueError, match=r"expected one count in 0\.\.0"):
        verifier.commit(cache, torch.tensor([3]))


@torch.no_grad()
def test_a_step_made_between_verify_and_commit_takes_the_stage_with_it(verifier: Verifier) -> None:
    cache, _ = verifier.prefill([random_ids(verifier.vocab_size, 11)])
    verifier.verify(random_ids(verifier.vocab_size, 3)[None], cache)
    Step(verifier, 2)
    with pytest.raises(ValueError, match=r"0\.\.0"):
        verifier.commit(cache, torch.tensor([2]))
