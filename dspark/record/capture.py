"""The target runs teacher-forced over the sequences, and what it says goes to the writer."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dspark.data.chat import Encoded
from dspark.errors import RecordError
from dspark.record.format import group_by_tokens
from dspark.record.writer import RecordWriter
from dspark.types import Target

TOKENS_PER_CALL = 8192
"""Tokens that the target reads at once, several sequences packed. Part of the format: it may move roundings."""
LOGIT_ROWS = 512
"""Rows of full-vocabulary logits held at once."""


def check_ids(sequences: Sequence[Encoded], vocab_size: int) -> None:
    """Refuse ids that the target has no embedding row for. Raises: RecordError naming the first sequence."""
    for sequence in sequences:
        low, high = int(sequence.ids_T.min()), int(sequence.ids_T.max())
        if low < 0 or high >= vocab_size:
            raise RecordError(f"{sequence.place}: found token ids {low}..{high}, expected 0..{vocab_size - 1}")


@torch.no_grad()
def capture(
    target: Target[Any], sequences: Sequence[Encoded], writer: RecordWriter, on_sequence: Callable[[], None]
) -> None:
    """Record ``sequences`` in order; shards that are already complete are not computed again.

    What goes into a shard depends on nothing outside it: a run that was stopped and started again writes the same
    bytes. ``on_sequence`` is called for every sequence that was read or was already recorded.
    Raises: RecordError for ids outside the vocabulary, and naming the first sequence of a pack with states not finite.
    """
    check_ids(sequences, target.vocab_size)
    lengths = [len(sequence.ids_T) for sequence in sequences]
    for index, group in enumerate(group_by_tokens(lengths, writer.manifest.shard_tokens)):
        members = sequences[group.start : group.stop]
        if writer.has_shard(index):
            for _ in members:
                on_sequence()
        else:
            writer.write_shard(index, _shard(target, members, writer.manifest.torch_dtype, on_sequence))


def _shard(
    target: Target[Any], sequences: Sequence[Encoded], dtype: torch.dtype, on_sequence: Callable[[], None]
) -> dict[str, torch.Tensor]:
    lengths = [len(sequence.ids_T) for sequence in sequences]
    offsets_S1 = torch.tensor([0, *lengths]).cumsum(0)
    ids_N = torch.cat([sequence.ids_T for sequence in sequences])
    loss_mask_N = torch.cat([sequence.loss_mask_T for sequence in sequences])
    num_tokens, num_supervised = len(ids_N), int(loss_mask_N.sum())
    taps_NLD = torch.empty(num_tokens, len(target.target_layer_ids), target.hidden_size, dtype=dtype)
    last_hidden_MD = torch.empty(num_supervised, target.hidden_size, dtype=dtype)
    label_logprobs_M = torch.empty(num_supervised, dtype=torch.float32)
    filled = 0
    for pack in group_by_tokens(lengths, TOKENS_PER_CALL):
        begin, end = int(offsets_S1[pack.start]), int(offsets_S1[pack.stop])
        _, output = target.prefill([sequence.ids_T for sequence in sequences[pack.start : pack.stop]])
        assert output.taps_NLD.dtype == output.last_hidden_ND.dtype == dtype
        if not (output.taps_NLD.isfinite().all() and output.last_hidden_ND.isfinite().all()):
            raise RecordError(
                f"{sequences[pack.start].place}: the target's states are not finite in this sequence or in the "
                f"{len(pack) - 1} after it; check its weights, or set target.dtype to float32"
            )
        taps_NLD[begin:end] = output.taps_NLD.cpu()
        # Position 0 of a sequence is never predicted, so the shifted mask does not reach across a border.
        rows = loss_mask_N[begin:end].roll(-1).nonzero()[:, 0]
        hidden_MD = output.last_hidden_ND[rows.to(output.last_hidden_ND.device)]
        last_hidden_MD[filled : filled + len(rows)] = hidden_MD.cpu()
        label_logprobs_M[filled : filled + len(rows)] = label_logprobs(target, hidden_MD, ids_N[begin + rows + 1])
        filled += len(rows)
        for _ in pack:
            on_sequence()
    tensors = {"offsets_S1": offsets_S1, "ids_N": ids_N.int(), "loss_mask_N": loss_mask_N, "taps_NLD": taps_NLD}
    return tensors | {"last_hidden_MD": last_hidden_MD, "label_logprobs_M": label_logprobs_M}


def label_logprobs(target: Target[Any], hidden_MD: torch.Tensor, labels_M: torch.Tensor) -> torch.Tensor:
    """The labels' log-probabilities [M] by the target's head, float32 on the CPU."""
    pairs = zip(torch.split(hidden_MD, LOGIT_ROWS), torch.split(labels_M, LOGIT_ROWS), strict=True)
    parts = [
        torch.log_softmax(target.logits(hidden_ND), -1).gather(1, labels_N.to(hidden_ND.device)[:, None])[:, 0].cpu()
        for hidden_ND, labels_N in pairs
    ]
    return torch.cat(parts).float()
