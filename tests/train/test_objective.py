"""The loss terms against DeepSpec's numbers and finite differences, and how they are pooled."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from agreeing import Teacher, compare, logits_of, objective, plain_loss, teacher_logits
from golden_draft import CASES, DTYPES, LOSSES, GoldenCase, close, golden_case
from torch import Tensor

from dspark.config import ObjectiveSection
from dspark.draft.anchors import BlockTargets
from dspark.draft.confidence import ConfidenceHead
from dspark.draft.model import DraftOutput
from dspark.train import objective as room
from dspark.train.batches import PIECE_NUMBERS
from dspark.train.objective import (
    Figures,
    Metrics,
    confidence_bce,
    cross_entropy,
    denominators,
    expected_acceptance_ratio,
    expected_acceptance_teacher_forced,
    forward_kl,
    slot_weights,
    total_variation,
)

DEEPSPEC = ObjectiveSection(**LOSSES)
EVERYTHING = ObjectiveSection(cross_entropy=0.3, forward_kl=1.0, total_variation=0.7, confidence=1.0)


def scored(case: GoldenCase, section: ObjectiveSection = DEEPSPEC, weight: float = 0.0) -> tuple[Tensor, Metrics]:
    targets = case.targets()
    pooled = denominators(targets, section.decay_positions)
    return objective(case.forward(), case.teacher(), targets, section, weight, pooled)


def mean(metrics: Metrics, name: str) -> float:
    return float(metrics[name][0] / metrics[name][1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_losses_and_every_gradient_are_deepspecs(dspark_golden: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    case = golden_case(dspark_golden, name, dtype)
    loss, metrics = scored(case)
    close(loss, case.expected["losses"]["total"], atol_float32=1e-5)
    for ours, theirs in (("cross_entropy", "ce"), ("total_variation", "l1"), ("confidence", "confidence")):
        numbers = case.expected["losses"][theirs]
        numerator, denominator = metrics[ours]
        close((numerator / (denominator + 1e-6)).to(dtype), numbers["value"], atol_float32=1e-5)
        assert float(numerator) == pytest.approx(numbers["numerator"], rel=1e-6)
        assert float(denominator) == pytest.approx(numbers["denominator"], rel=1e-12)
    loss.backward()
    for key, parameter in case.draft.named_parameters():
        expected = torch.tensor(case.expected["gradients"][key]).double()
        assert parameter.grad is not None
        close(parameter.grad, expected, atol_float32=2e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_acceptance_metrics_and_estimates_are_deepspecs(
    dspark_golden: dict[str, Any], name: str, dtype: torch.dtype
) -> None:
    case = golden_case(dspark_golden, name, dtype)
    targets, acceptance, logged = case.targets(), case.expected["acceptance"], case.expected["metrics"]
    valid_BAK = case.on_grid(targets.valid_AK)
    close(slot_weights(valid_BAK, 4.0), case.shared["loss_weights"])
    teacher_BAKV = case.on_grid(teacher_logits(case.teacher(), 5))
    close(teacher_BAKV[valid_BAK], torch.tensor(case.shared["teacher_logits"]).double()[valid_BAK])
    found = compare(case.logits(), teacher_BAKV, case.on_grid(targets.label_ids_AK))
    close(found.acceptance[valid_BAK], torch.tensor(case.expected["accept_rate"]).double()[valid_BAK])
    close(found.divergence[valid_BAK], torch.tensor(acceptance["kl"]).double()[valid_BAK])
    for b in range(2):
        for a in range(5):
            block = Figures(*(part[b, a : a + 1] for part in found))
            valid = valid_BAK[b, a : a + 1]
            close(expected_acceptance_teacher_forced(block, valid), acceptance["e_tf_per_block"][b][a])
            close(expected_acceptance_ratio(block, valid), acceptance["e_ratio_per_block"][b][a])
    _, metrics = scored(case)
    assert mean(metrics, "argmax_agreement") == pytest.approx(float(found.agrees[valid_BAK].mean()))
    tolerance = {"abs": 1e-5 if dtype == torch.float32 else 1e-9}
    expected = {f"conditional_acceptance_{k}": logged[f"accept_rate@{k}"] for k in range(5)} | {
        "cross_entropy": logged["ce_loss"],
        "total_variation": logged["l1_loss"],
        "confidence": logged["confidence_loss"],
        "confidence_bias": logged["confidence_bias"],
        "confidence_abs_error": logged["confidence_abs_error"],
        "confidence_cumprod_bias": logged["confidence_cumprod_bias"],
        "expected_acceptance_ratio": acceptance["e_ratio"],
        "expected_acceptance_teacher_forced": logged["tau_probabilistic"] - 1,
    }
    assert {key: mean(metrics, key) for key in expected} == {
        k: pytest.approx(v, **tolerance) for k, v in expected.items()
    }
    divergence = metrics["forward_kl"][0] / (metrics["forward_kl"][1] + 1e-6)
    assert float(divergence) == pytest.approx(acceptance["kl_weighted"], **tolerance)
    assert float(acceptance["e_tf"]) == pytest.approx(logged["tau_probabilistic"] - 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients_with_respect_to_the_logits_are_deepspecs(dspark_golden: dict[str, Any], dtype: torch.dtype) -> None:
    case = golden_case(dspark_golden, "mha_vanilla", dtype)
    output, teacher = case.forward(), case.teacher()
    logits_AKV = logits_of(case.draft, output).detach().requires_grad_()
    states_TV = teacher.last_hidden_TD @ teacher.head_VD.T
    bare = DraftOutput(logits_AKV, output.mixed_AKR * 0, output.markov_VR, output.confidence_logits_AK)
    eye = Teacher(torch.eye(logits_AKV.shape[-1], dtype=dtype), states_TV, case.anchors_A)
    nothing = dict.fromkeys(LOSSES, 0.0)
    length = nothing | {"acceptance_length": 1.0}
    sections = {
        "total": (DEEPSPEC, 0.0, 1),
        "e_tf": (ObjectiveSection(**length, acceptance_form="teacher_forced"), 1.0, -5),
        "e_ratio": (ObjectiveSection(**length), 1.0, -5),
        "kl_weighted": (ObjectiveSection(**nothing | {"forward_kl": 1.0}), 0.0, 1),
    }
    expected = case.expected["gradient_wrt_biased_logits"]
    assert set(sections) == set(expected)
    for name, (section, weight, factor) in sections.items():
        loss, _ = objective(bare, eye, case.targets(), section, weight, denominators(case.targets(), 4.0))
        (gradient_AKV,) = torch.autograd.grad(factor * loss, logits_AKV)
        close(
            case.on_grid(gradient_AKV),
            expected[name],
            atol_float32=2e-4 * float(torch.tensor(expected[name]).abs().max()),
        )


@pytest.mark.parametrize("form", ["ratio", "teacher_forced"])
@pytest.mark.parametrize("numbers", [1, 700, 1 << 20])
def test_loss_and_gradients_are_autograds_however_the_slots_are_cut(
    dspark_golden: dict[str, Any], form: str, numbers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(PIECE_NUMBERS, "cpu", numbers)
    case = golden_case(dspark_golden, "mha_rnn", torch.float64)
    section = EVERYTHING.model_copy(update={"acceptance_length": 0.5, "acceptance_form": form})
    inputs = (case.teacher(), case.targets(), section, 0.4, denominators(case.targets(), 4.0))
    parameters = list(case.draft.parameters())
    loss, _ = objective(case.forward(), *inputs)
    plain = plain_loss(case.forward(), *inputs)
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-12)
    gradients = (torch.autograd.grad(x, parameters) for x in (loss, plain))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-13)


def test_fused_parts_are_whole_graphs_for_any_weights_and_blocks_and_say_the_same(
    dspark_golden: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs, found, numbers = [], [], (700, 1100, 1 << 20)
    plain = room.fused

    def counted(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    @lru_cache
    def compiled(part: Callable[..., Any], _device: torch.device) -> Any:
        return torch.compile(part, fullgraph=True, dynamic=True, backend=counted)

    for fused in (plain, compiled):
        monkeypatch.setattr(room, "fused", fused)
        for most, kl, weight in zip(numbers, (1.0, 0.7, 0.4), (0.1, 0.3, 0.2), strict=True):
            case = golden_case(dspark_golden, "mha_vanilla", torch.float64)
            section, targets = EVERYTHING.model_copy(update={"forward_kl": kl}), case.targets()
            monkeypatch.setitem(PIECE_NUMBERS, "cpu", most)
            pooled = denominators(targets, 4.0)
            loss, metrics = objective(case.forward(), case.teacher(), targets, section, weight, pooled)
            gradients = torch.autograd.grad(loss, list(case.draft.parameters()))
            found.append([loss.detach(), *gradients, *(x for pair in metrics.values() for x in pair)])
    for ours, theirs in zip(found[:3], found[3:], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)
    assert len(graphs) == 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_our_numbers_are_none_of_the_wrong_ones(dspark_golden: dict[str, Any], name: str, dtype: torch.dtype) -> None:
    case = golden_case(dspark_golden, name, dtype)
    loss, metrics = scored(case)
    loss.backward()
    norms = {key: float(p.grad.norm()) for key, p in case.draft.named_parameters() if p.grad is not None}
    assert norms == {key: pytest.approx(v, rel=1e-4) for key, v in case.expected["gradient_l2_norms"].items()}
    ours = {
        "total": float(loss.detach()),
        "ce": mean(metrics, "cross_entropy"),
        "l1": mean(metrics, "total_variation"),
        "confidence": mean(metrics, "confidence"),
        "e_tf": mean(metrics, "expected_acceptance_teacher_forced"),
    }
    mistakes = {key: numbers for key, numbers in case.expected["wrong"].items() if key.startswith("y_wrong_")}
    assert mistakes
    for key, wrong in mistakes.items():
        if "total" in wrong:
            assert max(abs(ours[field] - wrong[field]) for field in ours) > 2e-4, key
        else:
            gaps = [abs(norms[k] / v - 1) for k, v in wrong["gradient_l2_norms"].items()]
            assert max(gaps) > 0.1, key
    for key, wrong_value in case.expected["acceptance"].items():
        if key.startswith("y_wrong_"):
            form = "ratio" if "ratio" in key else "teacher_forced"
            assert abs(mean(metrics, f"expected_acceptance_{form}") - wrong_value) > 1e-2, key


def _teacher(case: GoldenCase, shift: int) -> Teacher:
    return case.teacher(case.last_hidden_BTD[:, (torch.arange(23) + shift).clamp(0, 22)])


def _mask_without_product(case: GoldenCase) -> BlockTargets:
    positions_BAK = case.anchors_BA[..., None] + torch.arange(5) + 1
    padded_BT = torch.cat([case.loss_mask_BT, torch.zeros(2, 9, dtype=torch.bool)], 1)
    alone_BAK = torch.stack([mask_T[places] for mask_T, places in zip(padded_BT, positions_BAK, strict=True)])
    return replace(case.targets(), valid_AK=(alone_BAK & case.keep_BA[..., None]).flatten(0, 1))


def _deepspec_teacher(case: GoldenCase) -> Teacher:
    """A slot past the end reads the row before the last, as in DeepSpec: a mistake may count such a slot."""
    return case.teacher(case.last_hidden_BTD[:, torch.arange(23).clamp(max=21)])


Planted = tuple[BlockTargets, Teacher, ObjectiveSection]
MISTAKES: dict[str, Callable[[GoldenCase], Planted]] = {
    "labels_one_late": lambda case: (case.targets(+1), _deepspec_teacher(case), DEEPSPEC),
    "labels_one_early": lambda case: (case.targets(-1), _deepspec_teacher(case), DEEPSPEC),
    "teacher_one_late": lambda case: (case.targets(), _teacher(case, +1), DEEPSPEC),
    "teacher_one_early": lambda case: (case.targets(), _teacher(case, -1), DEEPSPEC),
    "teacher_pre_norm": lambda case: (case.targets(), case.teacher(case.pre_norm_BTD), DEEPSPEC),
    "mask_without_cumulative_product": lambda case: (_mask_without_product(case), case.teacher(), DEEPSPEC),
    "l1_halved": lambda case: (case.targets(), case.teacher(), DEEPSPEC.model_copy(update={"total_variation": 0.45})),
    "decay_is_block_size": lambda case: (
        case.targets(),
        case.teacher(),
        DEEPSPEC.model_copy(update={"decay_positions": 5.0}),
    ),
    "no_decay": lambda case: (case.targets(), case.teacher(), DEEPSPEC.model_copy(update={"decay_positions": 1e12})),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_planted_mistake_gives_the_wrong_number(dspark_golden: dict[str, Any], mistake: str) -> None:
    case = golden_case(dspark_golden, "mha_vanilla", torch.float64)
    right = float(scored(case)[0].detach())
    wrong = case.expected["wrong"][f"y_wrong_{mistake}"]
    targets, teacher, section = MISTAKES[mistake](case)
    pooled = denominators(targets, section.decay_positions)
    loss, _ = objective(case.forward(), teacher, targets, section, 0.0, pooled)
    assert float(loss.detach()) == pytest.approx(wrong["total"], rel=1e-6)
    assert abs(right - wrong["total"]) > 2e-4


def _attached(agreement: Figures, logits_AK: Tensor, weights_AK: Tensor) -> Tensor:
    softplus_AK = torch.nn.functional.softplus(logits_AK)
    return (weights_AK * (softplus_AK - agreement.acceptance * logits_AK)).sum()


@pytest.mark.parametrize("mistake", ["confidence_label_not_detached", "confidence_input_detached"])
def test_a_planted_detaching_mistake_gives_the_wrong_gradients(
    dspark_golden: dict[str, Any], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    case = golden_case(dspark_golden, "mha_vanilla", torch.float64)
    if mistake == "confidence_label_not_detached":
        monkeypatch.setattr(room, "confidence_bce", _attached)
        pooled = denominators(case.targets(), 4.0)
        plain_loss(case.forward(), case.teacher(), case.targets(), DEEPSPEC, 0.0, pooled).backward()
    else:
        forward = ConfidenceHead.forward
        monkeypatch.setattr(ConfidenceHead, "forward", lambda head, h, e: forward(head, h.detach(), e.detach()))
        scored(case)[0].backward()
    found = {key: float(p.grad.norm()) for key, p in case.draft.named_parameters() if p.grad is not None}
    wrong = case.expected["wrong"][f"y_wrong_{mistake}"]["gradient_l2_norms"]
    assert found == {key: pytest.approx(value, rel=1e-6) for key, value in wrong.items()}


def test_planted_mistakes_of_the_expected_acceptance_give_the_wrong_numbers(dspark_golden: dict[str, Any]) -> None:
    case = golden_case(dspark_golden, "mha_vanilla", torch.float64)
    targets = case.targets()
    valid_AK, num_blocks = targets.valid_AK, float(targets.valid_AK[:, 0].sum())
    case.last_hidden_BTD = case.last_hidden_BTD[:, torch.arange(23).clamp(max=21)]  # as in _deepspec_teacher
    both = [case.alone(b) for b in range(2)]
    logits_AKV = torch.cat([logits_of(case.draft, output) for output, _ in both])
    teacher_AKV = torch.cat([teacher_logits(teacher, 5) for _, teacher in both])
    found = compare(logits_AKV, teacher_AKV, targets.label_ids_AK)
    inverted = found._replace(draft_logprobs=found.teacher_logprobs, teacher_logprobs=found.draft_logprobs)
    ratio_AK = (found.draft_logprobs - found.teacher_logprobs).clamp(max=0).exp()
    own = found._replace(acceptance=found.acceptance * ratio_AK)
    kept_AK = case.keep_BA.view(-1, 1).expand_as(valid_AK)
    planted = {
        "e_tf_mean_over_all_blocks": expected_acceptance_teacher_forced(found, valid_AK) / len(valid_AK),
        "e_tf_without_mask": expected_acceptance_teacher_forced(found, kept_AK) / num_blocks,
        "e_ratio_inverted": expected_acceptance_ratio(inverted, valid_AK) / num_blocks,
        "e_ratio_reach_includes_own_slot": expected_acceptance_ratio(own, valid_AK) / num_blocks,
    }
    wrong = {key: case.expected["acceptance"][f"y_wrong_{key}"] for key in planted}
    assert {key: float(value.detach()) for key, value in planted.items()} == {
        key: pytest.approx(value, rel=1e-6) for key, value in wrong.items()
    }


TERMS: dict[str, Callable[[Figures, Tensor, Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda found, _valid, weights, _logits: cross_entropy(found, weights),
    "forward_kl": lambda found, _valid, weights, _logits: forward_kl(found, weights),
    "total_variation": lambda found, _valid, weights, _logits: total_variation(found, weights),
    "confidence": lambda found, _valid, weights, logits: confidence_bce(found, logits, weights),
    "teacher_forced": lambda found, valid, _weights, _logits: expected_acceptance_teacher_forced(found, valid),
    "ratio": lambda found, valid, _weights, _logits: expected_acceptance_ratio(found, valid),
}


@pytest.mark.parametrize("term", TERMS)
def test_the_gradient_of_a_term_is_its_finite_difference(term: str) -> None:
    torch.manual_seed(2)
    draft_AKV = torch.randn(2, 3, 7, dtype=torch.float64)
    teacher_AKV, confidence_AK = 2 * torch.randn_like(draft_AKV), torch.randn(2, 3, dtype=torch.float64)
    labels_AK = torch.randint(0, 7, (2, 3))
    valid_AK = torch.tensor([[True, True, True], [True, True, False]])
    weights_AK = slot_weights(valid_AK, 4.0)
    constant = compare(draft_AKV, teacher_AKV, labels_AK)

    def value(draft: Tensor, confidence: Tensor) -> Tensor:
        found = compare(draft, teacher_AKV, labels_AK)
        if term == "confidence":  # its label is a constant by definition
            found = found._replace(acceptance=constant.acceptance)
        return TERMS[term](found, valid_AK, weights_AK, confidence)

    draft_AKV.requires_grad_()
    confidence_AK.requires_grad_()
    gradients = torch.autograd.grad(value(draft_AKV, confidence_AK), (draft_AKV, confidence_AK), allow_unused=True)
    assert sum(gradient is not None for gradient in gradients) == 1
    for place, given in enumerate((draft_AKV, confidence_AK)):
        found = torch.zeros_like(given) if gradients[place] is None else gradients[place]
        for index in range(given.numel()):
            step = torch.zeros_like(given)
            step.view(-1)[index] = 1e-6
            both = [[draft_AKV.detach(), confidence_AK.detach()] for _ in range(2)]
            both[0][place], both[1][place] = given.detach() + step, given.detach() - step
            difference = (value(*both[0]) - value(*both[1])) / 2e-6
            assert float(found.reshape(-1)[index]) == pytest.approx(float(difference), rel=1e-5, abs=1e-8)


def test_the_teacher_of_a_slot_predicts_the_slots_label_and_no_neighbour(dspark_golden: dict[str, Any]) -> None:
    case = golden_case(dspark_golden, "mha_vanilla", torch.float64)
    following_BT = case.ids_BT[:, (torch.arange(23) + 1).clamp(max=22)]
    certain_TV = torch.nn.functional.one_hot(following_BT.flatten(), 61).double()
    said_AK = teacher_logits(Teacher(torch.eye(61).double(), certain_TV, case.anchors_A), 5).argmax(-1)
    for shift in (-1, 0, 1):
        labels_AK = case.targets(shift).label_ids_AK
        agreeing = (said_AK == labels_AK)[case.targets().valid_AK].double().mean()
        assert agreeing == 1 if shift == 0 else agreeing < 0.3


def test_a_batch_without_a_valid_slot_gives_zero_loss_and_zero_gradients(dspark_golden: dict[str, Any]) -> None:
    for keep in (True, False):
        case = golden_case(dspark_golden, "mha_vanilla", torch.float32)
        case.loss_mask_BT = torch.zeros_like(case.loss_mask_BT)
        case.keep_BA = torch.full_like(case.keep_BA, keep)
        case.last_hidden_BTD = torch.zeros_like(case.last_hidden_BTD)
        loss, metrics = scored(case, EVERYTHING, weight=0.5)
        loss.backward()
        assert float(loss.detach()) == 0.0
        assert all(not numerator.any() and not denominator.any() for numerator, denominator in metrics.values())
        for parameter in case.draft.parameters():
            assert parameter.grad is not None
            assert not parameter.grad.any()  # NaN counts as true


def test_micro_steps_with_pooled_denominators_sum_to_the_whole_batch(dspark_golden: dict[str, Any]) -> None:
    whole = golden_case(dspark_golden, "mha_vanilla", torch.float64)
    loss, metrics = scored(whole, EVERYTHING, weight=0.5)
    loss.backward()
    parts = golden_case(dspark_golden, "mha_vanilla", torch.float64)
    targets = parts.targets()
    pooled = denominators(targets, 4.0)
    total, sums = 0.0, dict.fromkeys(metrics, torch.zeros(2).double())
    for b in (0, 1):
        blocks, (output, teacher) = slice(5 * b, 5 * b + 5), parts.alone(b)
        part = BlockTargets(targets.label_ids_AK[blocks], targets.valid_AK[blocks])
        found, found_metrics = objective(output, teacher, part, EVERYTHING, 0.5, pooled)
        found.backward()
        total += float(found.detach())
        sums = {name: sums[name] + torch.stack([each.double() for each in found_metrics[name]]) for name in sums}
    assert total == pytest.approx(float(loss.detach()), rel=1e-12)
    for ours, theirs in zip(parts.draft.parameters(), whole.draft.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)
    for name, pair in metrics.items():
        torch.testing.assert_close(sums[name], torch.stack([each.double() for each in pair]))


def test_a_loss_is_the_weighted_sum_of_its_terms(dspark_golden: dict[str, Any]) -> None:
    case = golden_case(dspark_golden, "mha_vanilla", torch.float64)
    _, metrics = scored(case)
    weight = float(metrics["confidence"][1])
    for form in ("ratio", "teacher_forced"):
        section = EVERYTHING.model_copy(update={"acceptance_form": form})
        loss, _ = scored(case, section, weight=0.25)
        expected = sum(
            getattr(section, name) * float(metrics[name][0]) / (weight + 1e-6)
            for name in ("cross_entropy", "forward_kl", "total_variation", "confidence")
        )
        expected += 0.25 * (1 - mean(metrics, f"expected_acceptance_{form}") / 5)
        assert float(loss.detach()) == pytest.approx(expected, rel=1e-12)


def test_a_draft_without_a_confidence_head_trains_on_the_other_terms(dspark_golden: dict[str, Any]) -> None:
    case = golden_case(dspark_golden, "mha_vanilla", torch.float64)
    targets, output = case.targets(), case.forward()._replace(confidence_logits_AK=None)
    loss, metrics = objective(output, case.teacher(), targets, DEEPSPEC, 0.0, denominators(targets, 4.0))
    losses = case.expected["losses"]
    assert float(loss.detach()) == pytest.approx(0.1 * losses["ce"]["value"] + 0.9 * losses["l1"]["value"], rel=1e-7)
    assert not any("confidence" in name for name in metrics)


def test_the_teacher_gets_no_gradient_and_an_unweighted_confidence_head_gets_zeros(
    dspark_golden: dict[str, Any],
) -> None:
    case = golden_case(dspark_golden, "mha_vanilla", torch.float64)
    states_BTD = case.last_hidden_BTD.clone().requires_grad_()
    targets, teacher = case.targets(), case.teacher(states_BTD)
    section = EVERYTHING.model_copy(update={"confidence": 0.0})
    loss, _ = objective(case.forward(), teacher, targets, section, 0.5, denominators(targets, 4.0))
    loss.backward()
    assert states_BTD.grad is None
    for parameter in case.draft.parameters():
        assert parameter.grad is not None
    assert case.draft.confidence_head is not None
    assert not any(parameter.grad.any() for parameter in case.draft.confidence_head.parameters())


def test_an_acceptance_term_alone_gives_every_parameter_a_gradient_before_its_warm_up(
    dspark_golden: dict[str, Any],
) -> None:
    case = golden_case(dspark_golden, "mha_vanilla", torch.float64)
    section = ObjectiveSection(forward_kl=0.0, confidence=0.0, acceptance_length=1.0)
    loss, _ = scored(case, section, weight=0.0)
    loss.backward()
    assert loss == 0
    assert all(parameter.grad is not None for parameter in case.draft.parameters())
