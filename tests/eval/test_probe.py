"""A probe says what a measurement says and leaves the draft, its gradients and torch's generator as they were."""

from typing import Any

import torch
from golden_draft import exact, golden_case
from toy import TableTarget

from dspark.decode.generation import DraftSpeaker
from dspark.decode.sampling import Sampling
from dspark.eval.measure import decode_prompts
from dspark.eval.probe import Probe
from dspark.eval.statistics import acceptance_statistics

PROMPTS = (torch.tensor([3, 1, 4]), torch.tensor([1, 5]))


def test_a_probe_is_a_measurement_that_a_draft_in_training_does_not_notice(dspark_golden: dict[str, Any]) -> None:
    run = dspark_golden["decode_end_to_end"]
    draft = golden_case(dspark_golden, "mha_vanilla", torch.float32).draft.train().requires_grad_(True)
    taps = exact(run["token_table"], torch.float32), exact(run["position_table"], torch.float32)
    target = TableTarget(
        exact(run["logit_table"], torch.float32), taps=taps, target_layer_ids=draft.config.target_layer_ids
    )
    sampling = Sampling(1.0, 20)
    texts = decode_prompts(DraftSpeaker(target, draft), PROMPTS, sampling, 7)
    expected = acceptance_statistics([text.rounds for text in texts])
    draft.fc.weight.grad = torch.ones_like(draft.fc.weight)
    weights = {name: tensor.clone() for name, tensor in draft.state_dict().items()}
    state = torch.get_rng_state()
    probe = Probe(target, PROMPTS, sampling, 7)
    assert probe(draft) == probe(draft) == expected.mean_acceptance_length
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in draft.modules())
    assert all(parameter.requires_grad for parameter in draft.parameters())
    assert [name for name, p in draft.named_parameters() if p.grad is not None] == ["fc.weight"]
    assert bool((draft.fc.weight.grad == 1).all())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in draft.state_dict().items())
    assert not probe(draft.eval()) < 1
    assert not draft.training
