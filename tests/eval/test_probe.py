"""A probe is a measurement that a draft in training does not notice; rounded taps cost nothing, little or much."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from golden_draft import exact, golden_case
from toy import TableTarget

from dspark.data.chat import ChatFormat, Encoded, encode_prompt
from dspark.decode.generation import DraftSpeaker
from dspark.decode.sampling import Sampling
from dspark.decode.teacher_forced import estimate
from dspark.draft.model import DraftModel
from dspark.errors import PromptError
from dspark.eval.measure import decode_batches, decode_prompts
from dspark.eval.probe import Probe, TapCost, last_answer, tap_cost
from dspark.eval.statistics import acceptance_statistics
from dspark.eval.tasks import load_task
from dspark.export.draft_folder import check_target, read_draft
from dspark.layers.float8 import from_float8, to_float8
from dspark.target.loading import NANO_FOLDER, load_target, target_facts
from dspark.target.model import LingModel
from dspark.target.tokenizer import load_tokenizer
from dspark.verifier import PackedReader

PROMPTS = (torch.tensor([3, 1, 4]), torch.tensor([1, 5]))
FACTS = target_facts(NANO_FOLDER)
SAMPLING = Sampling(1.0, 48, FACTS.stop_token_ids)
Texts = list[tuple[torch.Tensor, torch.Tensor]]


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


@pytest.fixture(scope="module")
def pair() -> tuple[LingModel, DraftModel]:
    folder = NANO_FOLDER / "draft"
    sizes = {"vocab_size": FACTS.vocab_size, "hidden_size": FACTS.hidden_size, "num_layers": FACTS.num_layers}
    target = load_target(NANO_FOLDER, target_layer_ids=check_target(folder, **sizes).target_layer_ids)
    assert isinstance(target, LingModel)
    return target, read_draft(folder, (target.embedding_VD, target.head_VD))


@pytest.fixture(scope="module")
def texts(pair: tuple[LingModel, DraftModel]) -> Texts:
    """Four held-out prompts with the target's own answers."""
    chat = ChatFormat(load_tokenizer(NANO_FOLDER), FACTS.stop_token_ids)
    prompts = [encode_prompt(chat, conversation) for conversation in load_task("heldout", 4)]
    (answers,) = decode_batches(DraftSpeaker(*pair), prompts, SAMPLING, 0, [range(4)])
    return [(prompt_T, answer.ids_T) for prompt_T, answer in zip(prompts, answers, strict=True)]


def in_eight_bits(taps_NLD: torch.Tensor) -> torch.Tensor:
    return from_float8(*to_float8(taps_NLD), taps_NLD.dtype)


def in_steps(num_steps: int, taps_NLD: torch.Tensor) -> torch.Tensor:
    """A row's elements in so many steps on either side of zero."""
    largest_NL1 = taps_NLD.abs().amax(-1, keepdim=True)
    return (taps_NLD / largest_NL1 * num_steps).round() / num_steps * largest_NL1


def test_rounding_costs_nothing_little_or_much(pair: tuple[LingModel, DraftModel], texts: Texts) -> None:
    same, eight, coarse = (
        tap_cost(*pair, texts, SAMPLING, way) for way in (torch.clone, in_eight_bits, partial(in_steps, 1))
    )
    assert same.exact == same.rounded == eight.exact == coarse.exact > 2
    assert (same.difference, same.interval) == (0.0, (0.0, 0.0))
    assert (same.num_texts, same.num_blocks) == (4, eight.num_blocks)
    places = [range(0, len(text_T), pair[1].config.block_size) for _, text_T in texts]
    own = [estimate(*pair, *text, SAMPLING, anchors) for text, anchors in zip(texts, places, strict=True)]
    lengths = [length for each in own for length in each.lengths]
    assert (same.num_blocks, same.exact) == (len(lengths), pytest.approx(sum(lengths) / len(lengths), abs=1e-12))
    assert 0 < abs(eight.difference) < 0.05
    assert eight.interval[0] <= eight.difference <= eight.interval[1]
    assert coarse.difference == coarse.rounded - coarse.exact < -0.3


def test_a_reader_of_packs_finds_what_the_plain_target_finds(pair: tuple[LingModel, DraftModel], texts: Texts) -> None:
    target, draft = pair
    reader = PackedReader.load(NANO_FOLDER, 128, target.target_layer_ids, torch.float32, "cpu")
    found, expected = (tap_cost(each, draft, texts[:1], SAMPLING, in_eight_bits) for each in (reader, target))
    assert (found.exact, found.rounded) == pytest.approx((expected.exact, expected.rounded), abs=1e-3)


def test_texts_without_a_block_are_left_out_and_none_at_all_is_refused(
    pair: tuple[LingModel, DraftModel], texts: Texts
) -> None:
    short = (torch.tensor([1]), torch.tensor([2, 3]))
    found, expected = (tap_cost(*pair, each, SAMPLING, in_eight_bits) for each in ([short, *texts[:1]], texts[:1]))
    assert found == expected
    with pytest.raises(PromptError, match=r"no answer is longer than a block of \d+ tokens"):
        tap_cost(*pair, [short], SAMPLING, in_eight_bits)


def test_the_last_answer_of_a_dialogue() -> None:
    mask_T = torch.tensor([0, 1, 1, 0, 0, 1, 1, 1, 0]).bool()
    prompt_T, answer_T = last_answer(Encoded(torch.arange(9), mask_T, "here"))
    assert (prompt_T.tolist(), answer_T.tolist()) == ([0, 1, 2, 3, 4], [5, 6, 7])
    single = replace(Encoded(torch.arange(9), mask_T, "here"), loss_mask_T=torch.arange(9) > 6)
    assert [part_T.tolist() for part_T in last_answer(single)] == [list(range(7)), [7, 8]]


def test_the_line_says_which_way_it_went() -> None:
    cost = TapCost(4, 20, 3.5, 3.4876, -0.0124, (-0.02, 0.004))
    assert cost.line("float8 taps") == (
        "float8 taps: expected acceptance length 3.488, of exact ones 3.500; "
        "difference -0.0124, 95 % interval -0.0200 to +0.0040; 20 blocks of 4 texts"
    )
