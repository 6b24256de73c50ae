"""On toy vocabularies the ratio form is what speculative decoding accepts, value and gradient."""

import math
from collections.abc import Callable

import pytest
import torch
from agreeing import compare
from torch import Tensor

from dspark.train.objective import (
    Figures,
    expected_acceptance_ratio,
    expected_acceptance_teacher_forced,
)


class Toy:
    """A target with an arbitrary law of every prefix, and a draft with per-slot logits and a Markov bias."""

    def __init__(self, vocab_size: int, num_slots: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return 1.5 * torch.randn(shape, generator=generator, dtype=torch.float64)

        self.vocab_size, self.num_slots, self.generator = vocab_size, num_slots, generator
        self.target = [normal(vocab_size**slot, vocab_size) for slot in range(num_slots)]
        self.base_KV, self.bias_VV = normal(num_slots, vocab_size), normal(vocab_size, vocab_size)
        self.parameters = [self.base_KV.requires_grad_(), self.bias_VV.requires_grad_()]

    def prefixes(self, text_NK: Tensor, slot: int) -> Tensor:
        powers_K = self.vocab_size ** torch.arange(slot - 1, -1, -1)
        return (text_NK[:, :slot] * powers_K).sum(1)

    def draft_logits(self, previous_N: Tensor, slot: int) -> Tensor:
        return self.base_KV[slot] + (self.bias_VV[previous_N] if slot else 0)

    def previous(self, text_NK: Tensor, slot: int) -> Tensor:
        return text_NK[:, slot - 1] if slot else torch.zeros(len(text_NK), dtype=torch.long)

    def expectation(self, text_NK: Tensor, form: Callable[[Figures, Tensor], Tensor]) -> Tensor:
        """Per-text value [N] of an estimate, each text a block of its own."""
        slots = range(self.num_slots)
        shape = (len(text_NK), self.vocab_size)
        draft = [self.draft_logits(self.previous(text_NK, k), k).expand(shape) for k in slots]
        teacher = [self.target[k][self.prefixes(text_NK, k)] for k in slots]
        found = compare(torch.stack(draft, 1), torch.stack(teacher, 1), text_NK)
        valid = torch.ones(1, self.num_slots, dtype=torch.bool)
        return torch.vmap(lambda *parts: form(Figures(*(part[None] for part in parts)), valid))(*found)

    def texts(self) -> tuple[Tensor, Tensor]:
        """Every text and its probability under the target."""
        text_NK = torch.cartesian_prod(*[torch.arange(self.vocab_size)] * self.num_slots)
        logprobs_N = sum(
            self.target[k][self.prefixes(text_NK, k)].log_softmax(-1).gather(1, text_NK[:, k : k + 1])[:, 0]
            for k in range(self.num_slots)
        )
        return text_NK, torch.as_tensor(logprobs_N).exp()

    def accepted_by_the_law(self) -> Tensor:
        """Accepted drafts of speculative decoding, over every path: sum_k sum_y prod_{i<=k} min(p_i, q_i)(y_i)."""
        reach_N, total = torch.ones(1, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        previous_N = torch.zeros(1, dtype=torch.long)
        for slot in range(self.num_slots):
            draft_NV = self.draft_logits(previous_N, slot).expand(len(reach_N), -1).softmax(-1)
            both_NV = torch.minimum(self.target[slot].softmax(-1), draft_NV)
            reach_N = (reach_N[:, None] * both_NV).flatten()
            total = total + reach_N.sum()
            previous_N = torch.arange(self.vocab_size).repeat(len(both_NV))
        return total

    def sample(self, count: int) -> Tensor:
        """Texts drawn from the target. Returns: [count, K]."""
        text_NK = torch.zeros(count, self.num_slots, dtype=torch.long)
        for slot in range(self.num_slots):
            probs_NV = self.target[slot][self.prefixes(text_NK, slot)].softmax(-1)
            text_NK[:, slot] = torch.multinomial(probs_NV, 1, generator=self.generator)[:, 0]
        return text_NK

    @torch.no_grad()
    def decode(self, count: int) -> Tensor:
        """Accepted drafts of count runs of speculative decoding, by its own rule: draft, draw, compare, stop."""
        drafted_NK, alive_N = torch.zeros(count, self.num_slots, dtype=torch.long), torch.ones(count, dtype=torch.bool)
        accepted_N = torch.zeros(count, dtype=torch.float64)
        for slot in range(self.num_slots):
            draft_NV = self.draft_logits(self.previous(drafted_NK, slot), slot).expand(count, -1).softmax(-1)
            drafted_NK[:, slot] = torch.multinomial(draft_NV, 1, generator=self.generator)[:, 0]
            target_NV = self.target[slot][self.prefixes(drafted_NK, slot)].softmax(-1)
            ratio_N = (target_NV / draft_NV).gather(1, drafted_NK[:, slot : slot + 1])[:, 0]
            alive_N &= torch.rand(count, generator=self.generator, dtype=torch.float64) < ratio_N
            accepted_N += alive_N
        return accepted_N


@pytest.mark.parametrize("seed", range(5))
def test_the_ratio_form_over_every_text_is_exactly_what_speculative_decoding_accepts(seed: int) -> None:
    toy = Toy(vocab_size=3, num_slots=3, seed=seed)
    text_NK, probs_N = toy.texts()
    estimate = (probs_N * toy.expectation(text_NK, expected_acceptance_ratio)).sum()
    truth = toy.accepted_by_the_law()
    torch.testing.assert_close(estimate, truth, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(estimate, toy.parameters), torch.autograd.grad(truth, toy.parameters), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    surrogate = (probs_N * toy.expectation(text_NK, expected_acceptance_teacher_forced)).sum()
    assert abs(float((surrogate - truth).detach())) > 1e-3


def test_the_ratio_form_on_sampled_text_agrees_with_monte_carlo_speculative_decoding() -> None:
    toy, count = Toy(vocab_size=5, num_slots=4, seed=11), 20_000
    estimate_N = toy.expectation(toy.sample(count), expected_acceptance_ratio)
    accepted_N = toy.decode(count)
    gap = float(estimate_N.detach().mean() - accepted_N.mean())
    error = math.sqrt(float(estimate_N.detach().var() + accepted_N.var()) / count)
    assert error < 0.02
    assert abs(gap) < 4 * error
    ours = torch.autograd.grad(estimate_N.mean(), toy.parameters)
    truth = torch.autograd.grad(toy.accepted_by_the_law(), toy.parameters)
    for found, expected in zip(ours, truth, strict=True):
        assert (found - expected).norm() < 0.05 * expected.norm()
    off_policy_N = toy.expectation(torch.randint(0, 5, (count, 4), generator=toy.generator), expected_acceptance_ratio)
    assert abs(float(off_policy_N.detach().mean() - accepted_N.mean())) > 10 * error
