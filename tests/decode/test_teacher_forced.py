"""What a draft would earn on a text: the sum that defines it, decoding's own counts, and what it must not depend on."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from speculating import Generation, speculate
from tiny import MASK_TOKEN_ID, VOCAB_SIZE, write_tiny_ling
from toy import SIZE, TableTarget, toy_draft, toy_pair

from dspark.data.chat import ChatFormat, encode_prompt
from dspark.decode.generation import generate
from dspark.decode.sampling import Sampling, row_uniforms, token_probs
from dspark.decode.teacher_forced import TeacherForced, estimate, round_starts
from dspark.draft.model import DraftModel
from dspark.draft.proposal import ContextCache, extend, propose
from dspark.errors import DraftMismatchError
from dspark.eval.tasks import load_task
from dspark.export.draft_folder import check_target, read_draft
from dspark.target.loading import NANO_FOLDER, load_target, target_facts
from dspark.target.tokenizer import load_tokenizer

Pair = tuple[Any, DraftModel]
Numbers = tuple[list[float], list[float], list[float]]
SAMPLINGS = [Sampling(0.0, 15), Sampling(0.7, 15), Sampling(0.7, 15, top_k=3), Sampling(0.7, 15, top_p=0.8)]
RIGHT: dict[str, int] = dict.fromkeys(("label", "teacher", "context", "previous"), 0)


@pytest.fixture(scope="module")
def tiny_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder: Path = write_tiny_ling(tmp_path_factory.mktemp("ling"))
    target = load_target(folder, target_layer_ids=(0, 3), dtype=torch.float64)
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_target_layers": 6, "target_layer_ids": (0, 3)}
    draft = toy_draft(sizes | {"mask_token_id": MASK_TOKEN_ID, "block_size": 4}, 2, torch.float64)
    with torch.no_grad():
        draft.markov_head.markov_w2.weight.mul_(0.2)
    draft.bind(target.embedding_VD, target.head_VD)
    return target, draft


@torch.no_grad()
def laws(pair: Pair, ids: Sequence[int], anchor: int, sampling: Sampling, shift: dict[str, int] = RIGHT) -> Any:
    """Both laws of every slot as decoding makes them, the tokens of ``ids`` in place of drafts. ``shift``: faults."""
    target, draft = pair
    block_size, whole = draft.config.block_size, torch.tensor(ids)
    context = ContextCache(draft)
    extend(draft, context, target.prefill([whole])[1].taps_NLD[: anchor + shift["context"]])
    forced = iter(ids[anchor + 1 + shift["previous"] :])
    rows_KV = propose(draft, context, ids[anchor], lambda _: next(forced, 0)).logits_KV
    behind = [whole[: anchor + slot + 1 + shift["teacher"]] for slot in range(block_size)]
    teacher_KV = torch.cat([target.logits(target.prefill([prefix])[1].last_hidden_ND[-1:]) for prefix in behind])
    return token_probs(teacher_KV, sampling).tolist(), token_probs(rows_KV, sampling).tolist()


def by_hand(pair: Pair, ids: Sequence[int], anchor: int, sampling: Sampling, shift: dict[str, int] = RIGHT) -> Numbers:
    """Survival, the path's survival, and both lengths of one block."""
    survival, path, product, chance = [], [], 1.0, 1.0
    p_KV, q_KV = laws(pair, ids, anchor, sampling, shift)
    for slot, (p, q) in enumerate(zip(p_KV, q_KV, strict=True)):
        product *= sum(min(p[v], q[v]) for v in range(len(p)))
        label = ids[anchor + slot + 1 + shift["label"]]
        chance *= min(1.0, q[label] / p[label]) if p[label] else 0.0
        survival.append(product)
        path.append(chance)
    return survival, path, [1 + sum(survival), 1 + sum(path)]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "drawn", "top_k", "top_p"])
@pytest.mark.parametrize("kind", ["tiny", "toy"])
def test_the_estimate_is_the_sum_over_blocks_drafted_one_by_one(kind: str, sampling: Sampling, tiny_pair: Pair) -> None:
    pair = tiny_pair if kind == "tiny" else toy_pair(torch.float64)
    target, draft = pair
    prompt_ids_T, anchors = torch.tensor([2, 0, 1, 3, 3]), (0, 3, 4, 9)
    (text_ids_T,) = generate(target, [prompt_ids_T], sampling, [row_uniforms(5, 0)])
    found = estimate(target, draft, prompt_ids_T, text_ids_T, sampling, anchors)
    ids = [*prompt_ids_T.tolist(), *text_ids_T.tolist()]
    blocks = [by_hand(pair, ids, 5 + anchor, sampling) for anchor in anchors]
    assert found.anchors == anchors
    assert found.lengths == pytest.approx([lengths[0] for *_, lengths in blocks], abs=1e-9)
    assert found.path_lengths == pytest.approx([lengths[1] for *_, lengths in blocks], abs=1e-9)
    sums = [sum(column) for column in zip(*(survival for survival, *_ in blocks), strict=True)]
    assert found.survival_sums == pytest.approx(sums, abs=1e-9)
    assert found.slot_counts == (4,) * draft.config.block_size


@pytest.mark.parametrize("fault", ["label", "teacher", "context", "previous"])
def test_a_shift_by_one_is_seen(fault: str) -> None:
    pair, prompt_ids_T, sampling = toy_pair(torch.float64), torch.tensor([2, 0, 1, 3, 3]), Sampling(2.0, 15)
    (text_ids_T,) = generate(pair[0], [prompt_ids_T], sampling, [row_uniforms(5, 0)])
    found = estimate(*pair, prompt_ids_T, text_ids_T, sampling, range(11))
    ids, shift = [*prompt_ids_T.tolist(), *text_ids_T.tolist()], RIGHT | {fault: 1}
    wrong = [by_hand(pair, ids, 5 + anchor, sampling, shift)[2] for anchor in range(11)]
    assert max(abs(lengths[1] - right) for lengths, right in zip(wrong, found.path_lengths, strict=True)) > 0.02
    if fault != "label":  # the products of mean acceptances know no label
        assert max(abs(lengths[0] - right) for lengths, right in zip(wrong, found.lengths, strict=True)) > 0.02


@pytest.mark.parametrize("sampling", [Sampling(1.0, 9), Sampling(0.8, 9, top_k=3)], ids=["drawn", "top_k"])
def test_over_all_texts_the_path_lengths_average_to_what_decoding_accepts(sampling: Sampling) -> None:
    """Exactly, by going through all drafts and all texts; the products of mean acceptances do not."""
    pair, prompt_ids_T = toy_pair(torch.float64), torch.tensor([2, 1])
    kept, lengths, path_lengths = 1.0, 0.0, 0.0
    for text in itertools.product(range(SIZE), repeat=3):
        ids = [*prompt_ids_T.tolist(), 0, *text]
        p_KV, q_KV = (torch.tensor(rows, dtype=torch.float64) for rows in laws(pair, ids, 2, sampling))
        p_K, q_K = (rows.gather(1, torch.tensor(text)[:, None])[:, 0] for rows in (p_KV, q_KV))
        for slot in range(3):
            if not any(text[slot + 1 :]):  # each start of a text once
                kept += float(torch.minimum(p_K, q_K)[: slot + 1].prod())
        found = estimate(*pair, prompt_ids_T, torch.tensor([0, *text]), sampling, (0,))
        lengths += float(p_K.prod()) * found.lengths[0]
        path_lengths += float(p_K.prod()) * found.path_lengths[0]
    assert path_lengths == pytest.approx(kept, abs=1e-12)
    assert abs(lengths - kept) > 1e-3


def alike_pair(num_wrong: int) -> Pair:
    """A target whose law depends on the token before only, and a draft whose Markov head says just that, but for the
    first num_wrong tokens.
    """
    generator, size = torch.Generator().manual_seed(6), 24
    logits_SV = 2 * torch.randn(size, size, generator=generator, dtype=torch.float64)
    taps = tuple(torch.randn(9, rows, 4, generator=generator, dtype=torch.float64) for rows in (size, 8))
    target = TableTarget(logits_SV, taps=(taps[0], taps[1]), target_layer_ids=(1, 4))
    sizes = {"vocab_size": size, "hidden_size": 4, "num_target_layers": 8, "target_layer_ids": (1, 4)}
    draft = toy_draft(sizes | {"mask_token_id": 0, "markov_rank": size}, 4, torch.float64)
    draft.bind(taps[0][0], torch.zeros(size, 4, dtype=torch.float64))
    logits_SV = torch.cat((logits_SV[:num_wrong].roll(1, 1), logits_SV[num_wrong:]))
    with torch.no_grad():
        draft.markov_head.markov_w1.weight.copy_(torch.eye(size))
        draft.markov_head.markov_w2.weight.copy_(logits_SV.T)
    return target, draft


def greedy_counts(pair: Pair, prompt_ids_T: torch.Tensor, sampling: Sampling) -> tuple[Generation, TeacherForced]:
    """A greedy text, and the estimate at its round starts, which must be the lengths of those rounds."""
    text = speculate(*pair, prompt_ids_T, sampling, row_uniforms(0, 0))
    starts = round_starts(text.rounds)
    found = estimate(*pair, prompt_ids_T, text.ids_T, sampling, starts)
    rounds = dict(zip(starts, text.rounds, strict=True))
    assert list(found.lengths) == [rounds[anchor].acceptance_length for anchor in found.anchors]
    assert found.path_lengths == found.lengths
    accepted = [rounds[anchor].accepted_drafts for anchor in found.anchors]
    assert list(found.survival_sums) == [sum(n > slot for n in accepted) for slot in range(len(found.survival_sums))]
    return text, found


def test_greedy_estimates_at_round_starts_are_the_decoded_counts_wherever_the_text_ends() -> None:
    pair, block_size, cut = alike_pair(8), 3, []
    ends = [(9, (stop,)) for stop in range(24)] + [(length, ()) for length in range(1, 10)]
    for prompt, (length, stops) in itertools.product((2, 9, 17), ends):
        sampling = Sampling(0.0, length, stops)
        text, found = greedy_counts(pair, torch.tensor([prompt]), sampling)
        num_tokens, is_stopped = len(text.ids_T), int(text.ids_T[-1]) in stops
        inside = [a for a in round_starts(text.rounds) if is_stopped or a + block_size < num_tokens]
        assert list(found.anchors) == inside
        cut += [counts.accepted_drafts for counts in text.rounds if is_stopped and counts.is_cut]
    assert set(cut) == {1, 2, 3}, "an accepted stop token ended blocks at every slot"


def test_greedy_estimates_of_the_shipped_draft_are_its_decoded_counts() -> None:
    facts, folder = target_facts(NANO_FOLDER), NANO_FOLDER / "draft"
    sizes = {"vocab_size": facts.vocab_size, "hidden_size": facts.hidden_size, "num_layers": facts.num_layers}
    target = load_target(NANO_FOLDER, target_layer_ids=check_target(folder, **sizes).target_layer_ids)
    draft = read_draft(folder, (target.embedding_VD, target.head_VD))
    chat = ChatFormat(load_tokenizer(NANO_FOLDER), facts.stop_token_ids)
    rounds = 0
    for conversation in load_task("heldout", 3):
        _, found = greedy_counts(
            (target, draft), encode_prompt(chat, conversation), Sampling(0.0, 48, facts.stop_token_ids)
        )
        rounds += len(found.anchors)
    assert rounds > 20


def test_a_draft_with_the_law_of_the_target_fills_every_block() -> None:
    pair, prompt_ids_T, sampling = alike_pair(0), torch.tensor([1]), Sampling(1.0, 30)
    text = speculate(*pair, prompt_ids_T, sampling, row_uniforms(2, 0))
    found = estimate(*pair, prompt_ids_T, text.ids_T, sampling, round_starts(text.rounds))
    assert len(found.anchors) > 5
    assert found.lengths == pytest.approx([4.0] * len(found.anchors), abs=1e-12)
    assert found.path_lengths == pytest.approx(found.lengths, abs=1e-12)


def test_blocks_do_not_depend_on_those_that_share_their_pass(tiny_pair: Pair) -> None:
    prompt_ids_T, text_ids_T = torch.arange(4), torch.arange(20, 50)
    anchors = tuple(range(0, 26, 3))
    together = estimate(*tiny_pair, prompt_ids_T, text_ids_T, SAMPLINGS[1], anchors)
    alone = [estimate(*tiny_pair, prompt_ids_T, text_ids_T, SAMPLINGS[1], (anchor,)) for anchor in anchors]
    assert together.lengths == pytest.approx([found.lengths[0] for found in alone], abs=1e-12)
    assert together.path_lengths == pytest.approx([found.path_lengths[0] for found in alone], abs=1e-12)


def test_texts_too_short_for_a_block_have_none_and_anchors_outside_are_refused() -> None:
    target, draft = toy_pair()
    prompt_ids_T, sampling = torch.tensor([2]), Sampling(1.0, 9, stop_token_ids=(3,))
    for text, anchors in (([], ()), ([1], (0,)), ([3], (0,)), ([1, 2, 0], (0, 2)), ([1, 2, 0, 1], (1, 2, 3))):
        text_ids_T = torch.tensor(text, dtype=torch.int64)
        found = estimate(target, draft, prompt_ids_T, text_ids_T, sampling, anchors)
        assert found == TeacherForced((), (), (), (0.0,) * 3, (0,) * 3)
    ended = estimate(target, draft, prompt_ids_T, torch.tensor([1, 2, 3]), sampling, (0, 1, 2))
    assert (ended.anchors, ended.slot_counts) == ((0, 1), (2, 1, 0))
    for anchors in ((4,), (-1,), (1, 0), (1, 1)):
        with pytest.raises(ValueError, match="anchors must ascend within a text of 4 tokens"):
            estimate(target, draft, prompt_ids_T, torch.tensor([1, 2, 0, 1]), sampling, anchors)
    target.target_layer_ids = (1, 5)
    with pytest.raises(DraftMismatchError, match=r"layers \[1, 4\].*\[1, 5\]"):
        estimate(target, draft, prompt_ids_T, torch.tensor([1, 2, 0, 1]), sampling, (0,))


def test_a_text_without_rounds_has_no_starts() -> None:
    assert round_starts(()) == ()
