"""Checks of a record, of what stands in it, and of a draft: what it predicts, sees and accepts."""

from copy import copy
from math import log
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from dspark.cli.doctor.subject import Finding, NotApplicable, Subject, close
from dspark.cli.doctor.target import supervised
from dspark.cli.identity import fields_of, fingerprints
from dspark.data.chat import Encoded
from dspark.decode.generation import DraftSpeaker, generate
from dspark.decode.sampling import Sampling, row_uniforms
from dspark.decode.teacher_forced import estimate
from dspark.draft.anchors import slot_positions
from dspark.draft.proposal import ContextCache, extend, propose
from dspark.eval.measure import decode_prompts, expect, summarise
from dspark.eval.tasks import load_prompts
from dspark.export.draft_folder import draft_parameter_count, read_draft, write_draft
from dspark.files import differences
from dspark.record.checking import check_shards
from dspark.target.loading import target_fingerprint
from dspark.target.tokenizer import load_tokenizer

NUM_SEQUENCES, SHOWN_LETTERS = 200, 300
"""Sequences whose masks are looked at, evenly spread; and how much of the first one's is shown."""
NUM_PROMPTS, GREEDY_TOKENS, ANCHORS_APART = 8, 32, 8
LEARNED_LENGTH, UNLIKE = 1.2, 1.02
"""Fewer tokens a round say nothing about a draft; and by so much another reading must be better to be the right one."""
LEARNED_NATS, PARITY = 0.5, {torch.float32: 0.05, torch.float64: 0.05, torch.bfloat16: 0.15}
"""By so much a draft must be better than chance before its slots can be told apart; and by so much of the decoded
length teacher forcing may be off: where logits nearly tie, as they often do in bfloat16, a window's sums turn them.
"""


def record_origin(subject: Subject) -> Finding:
    """The record is whole, and of this target, its tokenizer and its template."""
    manifest, folder = subject.record.manifest, subject.checkpoint.folder
    wrong = differences(manifest.model_dump(), fingerprints(folder, load_tokenizer(folder)))
    told = f"{manifest.total.num_sequences} sequences of {manifest.total.num_tokens:,} tokens"
    return Finding(not wrong, f"made with {wrong}" if wrong else told)


def loss_mask(subject: Subject) -> Finding:
    """Words are supervised everywhere, not markers alone, and never everything of a conversation."""
    reader, special = subject.record, subject.chat.special_ids
    for index in range(0, len(reader), max(1, len(reader) // NUM_SEQUENCES)):
        ids_T, mask_T = reader.text(index)
        is_talk = reader.manifest.answers == "target" or not special.isdisjoint(ids_T[1:-1].tolist())
        if special.issuperset(ids_T[mask_T].tolist()):
            return Finding(False, f"sequence {index} supervises no words")
        if mask_T[1:].all() and is_talk:
            return Finding(False, f"sequence {index} supervises everything, also what was asked")
    shown = " | ".join(str(subject.chat.tokenizer.decode(run)) for run in supervised(*reader.text(0)))
    words = " ".join(shown.split())[:SHOWN_LETTERS]
    return Finding(True, f"supervised in the first of {len(reader)} sequences: {words}")


def record_rows(subject: Subject) -> Finding:
    """Checksums of the first and the last shard hold, and the target says of their first texts what stands there."""
    reader, shards = subject.record, sorted({0, len(subject.record.manifest.shards) - 1})
    if reader.manifest.target_fingerprint != target_fingerprint(subject.folder):
        raise NotApplicable("the record is of another target")
    texts = {place: Encoded(*reader.text(place), "") for shard in shards for place in reader.members(shard)}
    found = [*check_shards(reader, subject.tapping(reader.manifest.target_layer_ids), texts, shards)]
    faults = [f"shard {each.index}: {each.fault}" for each in found if each.fault]
    farthest = max(each.states_error or 0.0 for each in found)
    return Finding(not faults, "; ".join(faults) or f"shards {shards}: states lie {farthest:.1g} of their norm away")


def draft_fits(subject: Subject) -> Finding:
    """The draft is this target's, and its file is whole."""
    config = subject.draft.config
    return Finding(True, f"{draft_parameter_count(config):,} parameters, layers {list(config.target_layer_ids)}")


def slot_alignment(subject: Subject) -> Finding:
    """Slot j predicts token p+j+1: the labels one place before or behind it are worse predicted.
    Source: specs/dspark.md 9, number 4.
    """
    draft, ids_T = subject.draft, subject.ids_T.to(subject.device)
    rows_T = torch.arange(len(ids_T), device=ids_T.device)
    anchors_A = rows_T[1 : -draft.config.block_size - 1 : ANCHORS_APART].contiguous()
    said = draft(ids_T, rows_T, _taps(subject, ids_T), torch.zeros_like(anchors_A), anchors_A)
    logits_AKV = draft.base_logits(said.hidden_AKD) + draft.markov_head.markov_w2(said.mixed_AKR)
    labels_AK3 = ids_T[slot_positions(anchors_A, draft.config.block_size)[..., None] + rows_T[:3]]
    before, own, behind = logits_AKV.log_softmax(-1).gather(2, labels_AK3).mean((0, 1)).tolist()
    told = f"labels shifted by -1, 0, +1 have {before:.2f}, {own:.2f}, {behind:.2f} nats a token"
    if max(before, own, behind) < LEARNED_NATS - log(draft.config.vocab_size):
        raise NotApplicable(f"the draft is no better than chance, is it trained? {told}")
    return Finding(own > max(before, behind), told)


def conventions(subject: Subject) -> Finding:
    """No other reading of the draft's config.json accepts more of the target's own texts: layer ids one off, or the
    other meaning of the anchor's slot. Source: specs/dspark.md 8, numbers 1 and 5.
    """
    draft, prompts, lengths = subject.draft, prompts_of(subject), dict[str, float]()
    greedy, ids = Sampling(0.0, GREEDY_TOKENS, subject.facts.stop_token_ids), draft.config.target_layer_ids
    readings: dict[str, dict[str, Any]] = {"as it says": {}}
    readings["sample_from_anchor the other way"] = {"sample_from_anchor": not draft.config.sample_from_anchor}
    for shift in (-1, 1):
        readings[f"layer ids {shift:+d}"] = {"target_layer_ids": tuple(index + shift for index in ids)}
    texts = generate(subject.tapping(ids), prompts, greedy, [row_uniforms(0, row) for row in range(len(prompts))])
    for name, change in readings.items():
        other = copy(draft)
        other.config = draft.config.model_copy(update=change)
        if not set(layers := other.config.target_layer_ids) <= set(range(subject.facts.num_layers - 1)):
            continue
        pair, pairs = (subject.tapping(layers), other), zip(prompts, texts, strict=True)
        found = [estimate(*pair, *each, greedy, range(len(each[1]))).lengths for each in pairs]
        if not any(found):
            raise NotApplicable("every text ended within its first block")
        lengths[name] = sum(map(sum, found)) / sum(map(len, found))
    told = ", ".join(f"{name} {length:.2f}" for name, length in lengths.items())
    own, best = lengths["as it says"], max(lengths.values())
    if best < LEARNED_LENGTH:
        raise NotApplicable(f"no reading of the draft accepts much, is it trained? {told}")
    return Finding(best <= own * UNLIKE, f"tokens a round by teacher forcing: {told}")


def leaks(subject: Subject) -> Finding:
    """A block reads the target's states before its anchor, in its own text, and nothing else.
    Source: specs/dspark.md 1.2 and 9, number 3.
    """
    draft, half = subject.draft, len(subject.ids_T) // 2
    ids_T, anchor = subject.ids_T[: 2 * half].to(subject.device), half + half // 2  # in the second of two texts
    rows_T = torch.arange(2 * half, device=ids_T.device)
    taps_TLD, is_own_T = _taps(subject, ids_T, half), (rows_T >= anchor) & (rows_T < anchor + draft.config.block_size)
    starts_A = rows_T[[0, half]]

    def said(is_shown_T: Tensor, ids_T: Tensor) -> list[Tensor]:
        shown_TLD = torch.where(is_shown_T[:, None, None], taps_TLD, 3 * taps_TLD.flip(0) + 1)
        return [each[1] for each in draft(ids_T, rows_T % half, shown_TLD, starts_A, starts_A + half // 2)[:2]]

    whole, blind = said(rows_T >= 0, ids_T), said(rows_T != anchor - 1, ids_T)
    past = said((rows_T >= half) & (rows_T < anchor), torch.where(is_own_T, ids_T, ids_T.flip(0)))
    faults = [] if all(map(torch.equal, whole, past)) else ["a block reads what lies behind its anchor, or elsewhere"]
    faults += ["a block does not read the state right before its anchor"] if torch.equal(whole[0], blind[0]) else []
    return Finding(not faults, "; ".join(faults) or "with another text before it, a block sees its own past alone")


def export_round_trip(subject: Subject) -> Finding:
    """Written and read again the draft proposes the same."""
    ids_T, tables = subject.ids_T, (subject.target.embedding_VD, subject.target.head_VD)
    with TemporaryDirectory() as place:
        write_draft(subject.draft, Path(place) / "draft", fields_of(subject.facts, num_anchors=1))
        again = read_draft(Path(place) / "draft", tables, dtype=subject.dtype, device=subject.device)
    said = []
    for draft in (subject.draft, again):
        extend(draft, context := ContextCache(draft), _taps(subject, ids_T[:-1]))
        said.append(propose(draft, context, int(ids_T[-1]), lambda logits_V: int(logits_V.argmax())))
    before, after = said  # each slot's logits follow from the id before it, so where they are alike the ids are
    return close(subject, after.logits_KV, before.logits_KV, f"before and after, the logits of {before.ids_K.tolist()}")


def parity(subject: Subject) -> Finding:
    """Decoding accepts what teacher forcing expects of the same rounds: training and drafting see the same."""
    pair = subject.tapping(subject.draft.config.target_layer_ids), subject.draft
    prompts, greedy = prompts_of(subject), Sampling(0.0, GREEDY_TOKENS, subject.facts.stop_token_ids)
    texts = decode_prompts(DraftSpeaker(*pair), prompts, greedy, 0)
    gap = expect(summarise("parity", 0.0, texts), pair, prompts, texts, greedy).decoding_gap
    if gap is None:
        raise NotApplicable("every text ended within its first block")
    told = f"{gap.num_rounds} rounds: decoded {gap.decoded:.2f} tokens each, teacher forcing expects {gap.forced:.2f}"
    return Finding(abs(gap.difference) <= PARITY[subject.dtype] * gap.decoded, told)


def prompts_of(subject: Subject) -> list[Tensor]:
    """The first held-out prompts; where the target has no template, the sample."""
    has_template = bool(subject.chat.tokenizer.chat_template)
    return [*load_prompts("heldout", subject.chat, NUM_PROMPTS).ids] if has_template else [subject.ids_T]


def _taps(subject: Subject, ids_T: Tensor, *borders: int) -> Tensor:
    """What the draft reads of texts that lie one after another, cut at ``borders``."""
    return subject.tapping(subject.draft.config.target_layer_ids).prefill(ids_T.tensor_split(borders))[1].taps_NLD
