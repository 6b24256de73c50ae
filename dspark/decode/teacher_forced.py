"""The acceptance length under teacher forcing: what a draft's blocks would earn on a text that is already there."""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from dspark.decode.drafter import check_layers
from dspark.decode.round import Round
from dspark.decode.sampling import Sampling, token_probs
from dspark.draft.anchors import block_targets, gather_positions, slot_positions
from dspark.draft.model import DraftModel
from dspark.types import Reading


class TeacherForced(NamedTuple):
    """One text's blocks; entry i of the first three belongs to the block whose anchor is token anchors[i] of the text.

    With p and q the target's and the draft's law of a slot behind the text's own tokens, and x the text's token there:
    ``lengths``: 1 + sum_k prod_{i<=k} alpha_i, alpha_i = sum_v min(p_i(v), q_i(v)).
    ``path_lengths``: the same with min(1, q_i(x_i) / p_i(x_i)) for alpha_i.
    ``survival_sums``, ``slot_counts``: for every slot k the sum of prod_{i<=k} alpha_i over the blocks that have the
    slot, and how many these are.

    How they compare with decoding, whose slot i stands behind the draft's own accepted tokens, not behind the target's:
    * Greedy, on a greedy text: both lengths are how far the drafts agree with the text, and at the decoding's own round
      starts they equal every round's acceptance_length (but for ties that rounding decides otherwise).
    * Drawn, at the round starts of the decoding that wrote the text: what follows a round start has the target's law,
      and prod_{i<=k} min(1, q_i(x_i) / p_i(x_i)) is the chance, given the whole text, that the round kept slot k. So
      the sums of acceptance_length and of ``path_lengths`` over the rounds have the same expectation, for any sampling
      and whichever rounds are left out because of the text.
    * ``lengths`` agree in slot 0 only. Slot 1 is kept with E[min(1, q_0 / p_0) alpha_1] over the target's tokens
      x_0, against alpha_0 E[alpha_1] here: decoding is ahead by the covariance of the two, which has no fixed sign. It
      is positive where tokens that are easily kept lead to places that are easy too; neither number is a bound.
    * At other anchors all this is another average: a round starts where the last one was refused or filled, and evenly
      spread anchors fall into long rounds more often than into short ones.
    Source: specs/dspark.md 5.1; that the path form holds given the text is worked out from there.
    """

    anchors: tuple[int, ...]
    lengths: tuple[float, ...]
    path_lengths: tuple[float, ...]
    survival_sums: tuple[float, ...]
    slot_counts: tuple[int, ...]


def round_starts(rounds: Sequence[Round]) -> tuple[int, ...]:
    """Which tokens of a text (0 is the one after the prompt) its rounds started from, in order."""
    lengths = [counts.acceptance_length for counts in rounds]
    return tuple(accumulate(lengths[:-1], initial=0)) if lengths else ()


@torch.no_grad()
def estimate(
    target: Reading, draft: DraftModel, prompt_ids_T: torch.Tensor, text_ids_T: torch.Tensor, sampling: Sampling,
    anchors: Sequence[int],
) -> TeacherForced:  # fmt: skip
    """Run the draft's training pass over blocks of a text that the target wrote: one pass of the target, one of the
    draft. Laws are those of ``sampling``, from ``token_probs`` as in decoding; its max_new_tokens is not read.

    Blocks that reach beyond the text are left out, for their last slots cannot be judged; so a text of block_size
    tokens or fewer has none. But a stop token ends a text for decoding too: where one does, these blocks stay, with the
    slots up to it, and to keep the stop token adds nothing to a length because no token follows it.
    Shapes: int64 [T], the prompt's T >= 1, the text's ids new ones only, T >= 0; the draft is bound. ``anchors`` count
    from the text's first token. Raises: ValueError unless they are tokens of the text in ascending order;
    DraftMismatchError for a draft that reads other layers than the target taps.
    """
    check_layers(draft.config.target_layer_ids, target.target_layer_ids)
    num_tokens, block_size = len(text_ids_T), draft.config.block_size
    if list(anchors) != sorted(set(anchors)) or not set(anchors) <= set(range(num_tokens)):
        raise ValueError(f"anchors must ascend within a text of {num_tokens} tokens, got {list(anchors)}")
    is_stopped = num_tokens > 0 and int(text_ids_T[-1]) in sampling.stop_token_ids
    last = num_tokens - 2 if is_stopped else num_tokens - 1 - block_size
    kept = tuple(anchor for anchor in anchors if anchor <= last)
    if not kept:
        return TeacherForced((), (), (), (0.0,) * block_size, (0,) * block_size)
    ids_T = torch.cat((prompt_ids_T, text_ids_T.to(prompt_ids_T)))
    output = target.prefill([ids_T])[1]
    ids_T = ids_T.to(output.taps_NLD.device)
    anchors_A = torch.tensor(kept, device=ids_T.device) + len(prompt_ids_T)
    places_AK = slot_positions(anchors_A, block_size)
    slots = block_targets(ids_T, torch.ones_like(ids_T, dtype=torch.bool), anchors_A, block_size)
    row = (ids_T, torch.arange(len(ids_T), device=ids_T.device), output.taps_NLD)
    said = draft(*row, torch.zeros_like(anchors_A), anchors_A)
    teacher_AKD = gather_positions(output.last_hidden_ND, places_AK)
    chances = []  # block by block, for the laws of all would be too large
    for hidden_KD, mixed_KR, teacher_KD, labels_K in zip(
        said.hidden_AKD, said.mixed_AKR, teacher_AKD, slots.label_ids_AK, strict=True
    ):
        q_KV = token_probs(draft.base_logits(hidden_KD) + draft.markov_head.markov_w2(mixed_KR), sampling)
        p_KV = token_probs(target.logits(teacher_KD), sampling)
        common_KV = torch.minimum(p_KV, q_KV)
        label_p_K, label_common_K = (x_KV.gather(1, labels_K[:, None])[:, 0] for x_KV in (p_KV, common_KV))
        ratio_K = label_common_K / label_p_K.clamp(min=torch.finfo(p_KV.dtype).tiny)
        chances.append(torch.stack((common_KV.sum(1), ratio_K)))
    survival_2AK = (torch.stack(chances, 1).double() * slots.valid_AK).cumprod(-1)
    lengthens_AK = places_AK + 1 < len(ids_T) - is_stopped
    lengths, path_lengths = (1 + (survival_2AK * lengthens_AK).sum(-1)).tolist()
    sums, counts = survival_2AK[0].sum(0).tolist(), slots.valid_AK.sum(0).tolist()
    return TeacherForced(kept, tuple(lengths), tuple(path_lengths), tuple(sums), tuple(counts))
