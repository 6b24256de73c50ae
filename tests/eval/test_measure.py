"""What is measured is what was decoded: counts, time, loops, and texts that do not depend on their neighbours."""

from functools import partial
from typing import Any

import pytest
import torch
from golden_draft import exact
from speculating import speculate
from toy import TableTarget

from dspark.config import DraftConfig, EvalSection
from dspark.decode import round as round_module
from dspark.decode.drafter import LookupDrafter
from dspark.decode.generation import DraftSpeaker, PlainSpeaker
from dspark.decode.round import Round, accept
from dspark.decode.sampling import Sampling, row_uniforms
from dspark.decode.speaking import Speaker
from dspark.draft.model import DraftModel
from dspark.errors import PromptError
from dspark.eval.measure import (
    Difference,
    Measurement,
    compare,
    compare_greedy,
    decode_batches,
    decode_prompts,
    is_looping,
    summarise,
)
from dspark.eval.timing import DecodedText

PROMPTS = [torch.tensor([3, 1, 4]), torch.tensor([1, 5]), torch.tensor([9])]


@pytest.fixture(scope="module")
def pair(dspark_golden: dict[str, Any]) -> tuple[TableTarget, DraftModel]:
    """The golden file's table target and its draft."""
    golden = dspark_golden["decode_end_to_end"]
    tables = tuple(exact(golden[name], torch.float32) for name in ("token_table", "position_table"))
    config = DraftConfig(
        max_position_embeddings=64, **{k: v for k, v in dspark_golden["config"].items() if k != "num_anchors"}
    )
    target = TableTarget(
        exact(golden["logit_table"], torch.float32), taps=tables, target_layer_ids=config.target_layer_ids
    )
    draft = DraftModel(config)
    weights = {name: exact(value, torch.float32) for name, value in dspark_golden["weights"].items()}
    tables = weights.pop("embed_tokens.weight"), weights.pop("lm_head.weight")
    draft.load_state_dict(weights)
    draft.bind(*tables)
    return target, draft.eval()


def test_a_measurement_pools_the_rounds_of_speculate(pair: tuple[TableTarget, DraftModel]) -> None:
    sampling = Sampling(1.0, 20)
    texts = decode_prompts(DraftSpeaker(*pair), PROMPTS, sampling, 7)
    measurement = summarise("toy", 1.0, texts)
    alone = [speculate(*pair, prompt, sampling, row_uniforms(7, index)) for index, prompt in enumerate(PROMPTS)]
    rounds = [counts for generation in alone for counts in generation.rounds]
    assert (measurement.task, measurement.temperature, measurement.num_prompts) == ("toy", 1.0, 3)
    assert measurement.new_tokens == sum(len(generation.ids_T) for generation in alone) == 60
    assert measurement.tokens_per_second == pytest.approx(60 / measurement.seconds)
    assert measurement.acceptance is not None
    assert measurement.acceptance.num_rounds == len(rounds)
    assert measurement.acceptance.mean_acceptance_length == sum(r.acceptance_length for r in rounds) / len(rounds)


def test_a_prompt_says_the_same_whatever_else_is_measured(pair: tuple[TableTarget, DraftModel]) -> None:
    sampling = Sampling(1.0, 20)
    few, all_three = (decode_prompts(DraftSpeaker(*pair), PROMPTS[:count], sampling, 7) for count in (2, 3))
    assert [text.ids_T.tolist() for text in few] == [text.ids_T.tolist() for text in all_three[:2]]
    (batch,) = decode_batches(DraftSpeaker(*pair), PROMPTS, sampling, 7, [(2, 1)])
    assert [text.ids_T.tolist() for text in batch] == [all_three[n].ids_T.tolist() for n in (2, 1)]
    assert few[0].ids_T.tolist() != decode_prompts(DraftSpeaker(*pair), PROMPTS[:1], sampling, 8)[0].ids_T.tolist()


def test_greedy_texts_with_and_without_a_draft_are_the_same(pair: tuple[TableTarget, DraftModel]) -> None:
    plain = decode_prompts(PlainSpeaker(pair[0]), PROMPTS, Sampling(0.0, 20), 7)
    drafted = decode_prompts(DraftSpeaker(*pair), PROMPTS, Sampling(0.0, 20), 7)
    assert [text.ids_T.tolist() for text in plain] == [text.ids_T.tolist() for text in drafted]
    assert all(not text.rounds for text in plain)
    assert all(text.rounds for text in drafted)
    assert summarise("toy", 0.0, plain).acceptance is None


def test_a_task_whose_texts_stop_at_once_is_refused(pair: tuple[TableTarget, DraftModel]) -> None:
    first = {int(text.ids_T[0]) for text in decode_prompts(PlainSpeaker(pair[0]), PROMPTS, Sampling(0.0, 1), 7)}
    with pytest.raises(PromptError, match="all 3 texts stopped at their first token"):
        compared(pair, 0.0, stop_token_ids=tuple(first))


def text(ids: list[int], *lengths: int, is_looping: bool = False) -> DecodedText:
    rounds = tuple(Round(5, length - 1, length, False, ()) for length in lengths)
    return DecodedText(torch.tensor(ids), rounds, 2.0, is_looping, 0.5, {"prefill": 0.5, "verify": 1.5})


def test_texts_that_loop_are_counted_and_their_flattery_is_shown() -> None:
    measurement = summarise("t", 0.0, [text([1, 2, 3], 1, 1), text([4] * 13, 6, 6, is_looping=True)])
    assert measurement.looping_share == 0.5
    assert measurement.tokens_per_second == 16 / 4
    assert measurement.acceptance is not None
    assert measurement.acceptance.mean_acceptance_length == 14 / 4
    assert measurement.mean_acceptance_length_without_loops == 1.0
    assert summarise("t", 0.0, [text([4], 6, is_looping=True)]).mean_acceptance_length_without_loops is None


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([7] * 48, True),
        ([7] * 47, False),
        ([*range(100), *[1, 2, 3] * 16], True),
        ([*range(100), *[1, 2, 3] * 16, 9], False),
        ([*range(12)] * 4, True),
        ([*range(12)] * 3 + [*range(11)], False),
        ([*range(64)] * 4, True),
        ([*range(64)] * 3, False),
        ([*range(65)] * 8, False),
        ([*range(300)], False),
        ([], False),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_loop_is_a_run_that_ends_the_text_again_and_again(ids: list[int], expected: bool) -> None:
    assert is_looping(ids) is expected


def test_a_text_that_left_its_loop_to_stop_does_not_loop() -> None:
    logits_SV = torch.full((60, 60), -50.0)
    logits_SV[:59, 2] = 0.0
    logits_SV[59, 1] = 0.0
    target = TableTarget(logits_SV, step=lambda state, new_id: min(state + 1, 59))
    stopped, cut = (decode_prompts(PlainSpeaker(target), PROMPTS[:1], Sampling(0.0, n, (1,)), 0)[0] for n in (60, 52))
    assert stopped.ids_T.tolist() == [2] * 56 + [1]
    assert not stopped.is_looping
    assert cut.is_looping


def compared(
    pair: tuple[TableTarget, DraftModel], *temperatures: float, stop_token_ids: tuple[int, ...] = (), plain: bool = True
) -> dict[str, list[Measurement]]:
    """Plain decoding, lookup and the draft on the toy prompts."""
    target, draft = pair
    ways: dict[str, Speaker] = {"plain": PlainSpeaker(target)} if plain else {}
    ways["ngram"] = DraftSpeaker(target, partial(LookupDrafter, 4, target.vocab_size))
    ways["draft"] = DraftSpeaker(target, draft)
    plan = EvalSection(tasks=("toy",), max_new_tokens=20, temperatures=temperatures)
    prompts = [PROMPTS] * len(temperatures)
    return compare(
        ways, pair, prompts, plan, stop_token_ids, lambda name, *asked: decode_prompts(ways[name], *asked, 7)
    )


def test_greedy_texts_are_compared_with_plain_decoding_at_every_greedy_temperature(
    pair: tuple[TableTarget, DraftModel],
) -> None:
    found = compared(pair, 1.0, 0.0, 1e-6)
    assert list(found) == ["plain", "ngram", "draft"]
    for name in ("ngram", "draft"):
        sampled, *greedy = found[name]
        assert sampled.equality is None
        assert [(m.equality and m.equality.mismatches, m.acceptance is None) for m in greedy] == [(0, False)] * 2


@pytest.mark.parametrize("plain", [True, False])
def test_a_wrong_acceptance_is_a_fault_and_no_rounding(
    plain: bool, pair: tuple[TableTarget, DraftModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def always(ids_K: torch.Tensor, draft: torch.Tensor, target: torch.Tensor, uniforms: Any) -> tuple[int, int]:
        return len(ids_K), accept(ids_K[:0], draft[:0], target[-1:], uniforms)[1]

    monkeypatch.setattr(round_module, "accept", always)
    equality = compared(pair, 0.0, plain=plain)["draft"][0].equality
    assert equality is not None
    assert equality.mismatches == equality.faults == len(equality.differences) == 3
    assert all(difference.gap > equality.tie_gap for difference in equality.differences)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([0, 1, 3], (2, True)),  # 2 and 3 are all but equally likely after 1
        ([0, 1, 0], (2, False)),  # the two largest are, but this is neither
        ([0, 2, 0], (1, False)),
        ([0, 1], (1, False)),  # texts that only end elsewhere did not part by rounding
        ([0, 1, 2, 2], (3, False)),
    ],
    ids=str,
)
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 5e-4), (torch.bfloat16, 0.125)])
def test_rounding_is_told_apart_from_faults(
    ids: list[int], expected: tuple[int, bool], dtype: torch.dtype, near: float
) -> None:
    logits_SV = torch.tensor([[0, 4, 0, 0], [0, 0, 4, 4 - near], [0, 4, 0, 0], [4, 0, 0, 0]])
    target, sampling, prompts = TableTarget(logits_SV.to(dtype)), Sampling(0.0, 3), [torch.tensor([3])]
    plain = text([0, 1, 2])
    equality = compare_greedy(target, prompts, [text(ids)], sampling, [plain])
    position, is_tie = expected
    (difference,) = equality.differences
    assert (equality.mismatches, equality.faults) == (1, not is_tie)
    assert (difference.position, difference.is_tie) == expected
    if is_tie:
        assert difference == Difference(0, position, pytest.approx(near, abs=1e-6), True)
    assert compare_greedy(target, prompts, [plain], sampling, [plain]).mismatches == 0


def test_a_gap_at_or_above_the_bound_is_a_fault() -> None:
    logits_SV = torch.tensor([[0.0, 4.0, 4.0 - 2e-3], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    prompts, sampling = [torch.tensor([0])], Sampling(0.0, 2)
    for plain in ([text([0, 1])], None):
        found = compare_greedy(TableTarget(logits_SV), prompts, [text([0, 2])], sampling, plain)
        assert (found.mismatches, found.faults) == (1, 1)


@pytest.mark.parametrize(
    ("ids", "stop", "expected"),
    [
        ([1, 2, 0, 1, 2, 0], 9, None),
        ([1, 2, 0], 0, None),  # ends at its stop token
        ([1, 2], 9, (1, False)),  # ends too soon
        ([1, 2, 0, 1, 2, 0], 2, (1, False)),  # goes on behind a stop token
        ([1, 3, 0, 1, 2, 0], 9, (1, True)),  # 2 and 3 are all but equally likely after 1
        ([1, 3, 0, 0, 1, 2], 9, (3, False)),  # the fault counts, not the tie before it
        ([1, 3, 0], 9, (2, False)),  # and so does the end
        ([2, 0, 1, 2, 0, 1], 9, (0, False)),
    ],
    ids=str,
)
def test_a_text_without_a_plain_one_beside_it_is_judged_by_every_token_and_its_end(
    ids: list[int], stop: int, expected: tuple[int, bool] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.eval.measure.ROWS", 4)
    logits_SV = torch.tensor([[0, 4, 0, 0], [0, 0, 4, 4 - 5e-4], [4, 0, 0, 0], [4, 0, 0, 0]])
    sampling = Sampling(0.0, 6, (stop,))
    equality = compare_greedy(TableTarget(logits_SV), [torch.tensor([3, 0])], [text(ids)], sampling)
    assert [(d.position, d.is_tie) for d in equality.differences] == ([] if expected is None else [expected])
