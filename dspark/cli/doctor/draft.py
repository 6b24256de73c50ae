"""Checks of a draft: it fits, predicts the tokens it should, sees nothing it must not, and drafts as it was trained."""

from math import log
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from dspark.cli.doctor.subject import Finding, NotApplicable, Subject
from dspark.cli.identity import fields_of
from dspark.data.chat import encode_prompt
from dspark.decode.generation import DraftSpeaker
from dspark.decode.sampling import Sampling
from dspark.decode.teacher_forced import estimate, round_starts
from dspark.draft.anchors import slot_positions
from dspark.draft.proposal import ContextCache, extend, propose
from dspark.eval.measure import decode_prompts
from dspark.eval.statistics import decoding_gap
from dspark.eval.tasks import load_task
from dspark.export import draft_parameter_count, read_draft, write_draft
from dspark.record.checking import distance

NUM_PROMPTS, GREEDY_TOKENS = 4, 32
LEARNED_NATS = 0.5
"""By so much a draft must be better than chance before its slots can be told apart."""
PARITY = 0.05
"""By so much of the decoded length teacher forcing may be off: rounding turns near ties."""


def draft_fits(subject: Subject) -> Finding:
    """The draft is this target's, and its file is whole."""
    config = subject.draft.config
    size = f"{draft_parameter_count(config):,} parameters, blocks of {config.block_size}"
    return Finding(True, f"{size}, layers {list(config.target_layer_ids)}")


def slot_alignment(subject: Subject) -> Finding:
    """Slot j predicts token p+j+1: the labels one place before or behind it are worse predicted.
    Source: specs/dspark.md 9, number 4.
    """
    draft, ids_T = subject.draft, subject.ids_T.to(subject.device)
    rows_T = torch.arange(len(ids_T), device=ids_T.device)
    anchors_A = rows_T[len(ids_T) // 2 : -draft.config.block_size - 1]
    said = draft(ids_T, rows_T, _taps(subject, ids_T), torch.zeros_like(anchors_A), anchors_A)
    logits_AKV = draft.base_logits(said.hidden_AKD) + draft.markov_head.markov_w2(said.mixed_AKR)
    labels_AK3 = ids_T[slot_positions(anchors_A, draft.config.block_size)[..., None] + rows_T[:3]]
    before, own, behind = logits_AKV.log_softmax(-1).gather(2, labels_AK3).mean((0, 1)).tolist()
    if max(before, own, behind) < LEARNED_NATS - log(draft.config.vocab_size):
        raise NotApplicable(f"the draft predicts no better than chance, {own:.1f} nats a token: is it trained?")
    told = f"labels shifted by -1, 0, +1 have {before:.2f}, {own:.2f}, {behind:.2f} nats a token"
    return Finding(own > max(before, behind), told)


def leaks(subject: Subject) -> Finding:
    """A block reads the target's states before its anchor, in its own text, and nothing else.
    Source: specs/dspark.md 1.2 and 9, number 3.
    """
    draft, half, faults = subject.draft, len(subject.ids_T) // 2, list[str]()
    ids_T = subject.ids_T[: 2 * half].to(subject.device)  # two texts in a row
    taps_TLD, rows_T = _taps(subject, ids_T, half), torch.arange(2 * half, device=ids_T.device)
    starts_A = rows_T[[0, half]]
    anchors_A = starts_A + half // 2

    def said(ids_T: Tensor, is_kept_T: Tensor) -> list[Tensor]:
        shown_TLD = torch.where(is_kept_T[:, None, None], taps_TLD, 3 * taps_TLD.flip(0) + 1)
        return list(draft(ids_T, rows_T % half, shown_TLD, starts_A, anchors_A)[:2])

    before = said(ids_T, rows_T >= 0)
    for block, (start, anchor) in enumerate(zip(starts_A.tolist(), anchors_A.tolist(), strict=True)):
        is_own_T = (rows_T >= anchor) & (rows_T < anchor + draft.config.block_size)
        after = said(torch.where(is_own_T, ids_T, ids_T.flip(0)), (rows_T >= start) & (rows_T < anchor))
        if not all(torch.equal(old[block], new[block]) for old, new in zip(before, after, strict=True)):
            faults.append(f"the block at {anchor} changes with what lies behind its anchor or in another text")
        if torch.equal(before[0][block], said(ids_T, rows_T != anchor - 1)[0][block]):
            faults.append(f"the block at {anchor} does not read the state right before its anchor")
    return Finding(not faults, "; ".join(faults) or "two texts in a row: blocks see their own past alone")


def export_round_trip(subject: Subject) -> Finding:
    """Written and read again the draft proposes the same."""
    ids_T, tables, found = subject.ids_T, (subject.target.embedding_VD, subject.target.head_VD), []
    with TemporaryDirectory() as place:
        write_draft(subject.draft, Path(place) / "draft", fields_of(subject.facts, num_anchors=1))
        again = read_draft(Path(place) / "draft", tables, dtype=subject.dtype, device=subject.device)
    for draft in (subject.draft, again):
        extend(draft, context := ContextCache(draft), _taps(subject, ids_T[:-1]))
        found.append(propose(draft, context, int(ids_T[-1]), lambda logits_V: int(logits_V.argmax())))
    (before_K, after_K), error = (
        (each.ids_K.tolist() for each in found),
        distance(found[1].logits_KV, found[0].logits_KV),
    )
    told = f"{before_K} before, {after_K} after, logits {error:.1g} of their norm away"
    return Finding(before_K == after_K and error <= subject.tolerance, told)


def parity(subject: Subject) -> Finding:
    """Decoding accepts what teacher forcing expects of the same rounds: training and drafting see the same."""
    target, sampling = subject.tapping(subject.draft.config.target_layer_ids), greedy_of(subject)
    prompts = prompts_of(subject)
    texts = decode_prompts(DraftSpeaker(target, subject.draft), prompts, sampling, 0)
    forced = [
        estimate(target, subject.draft, prompt_ids_T, text.ids_T, sampling, round_starts(text.rounds))
        for prompt_ids_T, text in zip(prompts, texts, strict=True)
    ]
    if not any(each.anchors for each in forced):
        raise NotApplicable("every text ended within its first block")
    gap = decoding_gap(forced, [text.rounds for text in texts])
    told = f"decoded {gap.decoded:.2f} tokens a round, teacher forcing expects {gap.forced:.2f} of the {gap.num_rounds}"
    return Finding(abs(gap.difference) <= PARITY * gap.decoded, told)


def greedy_of(subject: Subject) -> Sampling:
    return Sampling(0.0, GREEDY_TOKENS, subject.facts.stop_token_ids)


def prompts_of(subject: Subject) -> list[Tensor]:
    """The first held-out prompts; where the target has no template, the sample."""
    asked = load_task("heldout", NUM_PROMPTS) if subject.tokenizer.chat_template else ()
    return [encode_prompt(subject.chat, each) for each in asked] or [subject.ids_T]


def _taps(subject: Subject, ids_T: Tensor, *borders: int) -> Tensor:
    """What the draft reads of texts that lie one after another, cut at ``borders``."""
    return subject.tapping(subject.draft.config.target_layer_ids).prefill(ids_T.tensor_split(borders))[1].taps_NLD
