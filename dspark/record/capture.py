"""The target runs teacher-forced over the sequences, and what it says goes to the disk while it runs on."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.data.chat import Encoded
from dspark.errors import RecordError
from dspark.kernels.transfer import onto
from dspark.layers.float8 import to_float8
from dspark.record.format import Manifest, group_by_tokens
from dspark.record.leases import Leases
from dspark.record.order import drawn_order
from dspark.record.writer import ShardWriter
from dspark.types import Target
from dspark.verifier.plan import LOGIT_ROWS

TOKENS_PER_CALL = 8192
"""Tokens that the target reads at once, several sequences packed. Part of the format: it may move roundings."""
PACKS_WAITING = 2
"""Calls whose states wait to be written: memory for so many, and the target waits for the disk only behind them."""


class Drawn(Sequence[Encoded]):
    """Sequences in the order in which a record of this ``seed`` holds them."""

    def __init__(self, sequences: Sequence[Encoded], seed: int) -> None:
        self.sequences = sequences
        self.order_S = drawn_order(len(sequences), seed)

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: Any) -> Any:
        return self.sequences[int(self.order_S[index])]


@dataclass(frozen=True)
class Pack:
    """What the target says about sequences that it read together, under way to the host: the fields of ``format`` over
    all their tokens and all their predicted ones, is_finite bool []. ``arrived`` is the event to wait for on a GPU.
    """

    sequences: Sequence[Encoded]
    states: dict[str, Tensor]
    is_finite: Tensor
    arrived: torch.cuda.Event | None


def take_turns(
    missing: Callable[[], list[int] | None], leases: Leases, poll_seconds: float = 0.5
) -> Iterator[int | None]:
    """The shards that are this process's to record, and None while others are at all that are missing, until
    ``missing`` returns None.
    """
    while (numbers := missing()) is not None:
        index = next((number for number in numbers if leases.take(number)), None)
        if index is None:
            yield None
            time.sleep(poll_seconds)
        elif index in (missing() or ()):
            yield index
        else:  # its holder has finished meanwhile
            leases.release(index)


@torch.no_grad()
def capture(
    target: Target[Any],
    sequences: Sequence[Encoded],
    manifest: Manifest,
    shards: Iterable[int | None],
    open_shard: Callable[[int], ShardWriter] | None,
    on_sequences: Callable[[int, int], None],
) -> None:
    """Record ``shards`` (None: nothing to do for the moment) of ``sequences``, which are in the record's order.

    What goes into a shard depends on nothing outside it: a run that was stopped and started again, or another machine,
    writes the same bytes. A thread writes, at most ``PACKS_WAITING`` calls behind the target. ``open_shard`` is None on
    ranks that only help to compute. ``on_sequences`` is told how many sequences and tokens were read.
    Raises: RecordError naming the first sequence of a pack with states not finite, or when the disk refuses.
    """
    pending, unfinished, pool = deque[Future[None]](), list[ShardWriter](), ThreadPoolExecutor(1)

    def keep_up(most: int) -> None:
        while len(pending) > most:
            pending.popleft().result()

    def finish(writer: ShardWriter) -> None:
        writer.finish()
        unfinished.remove(writer)

    try:
        for index in shards:
            if index is None:
                keep_up(0)
                continue
            if open_shard:
                unfinished.append(writer := open_shard(index))
            members = [sequences[place] for place in range(*manifest.starts[index : index + 2])]
            for group in group_by_tokens([len(each.ids_T) for each in members], TOKENS_PER_CALL):
                pack = read_pack(target, members[group.start : group.stop], manifest.taps == "float8")
                if open_shard:
                    pending.append(pool.submit(_write, writer, pack))
                    keep_up(PACKS_WAITING)
                on_sequences(len(group), len(pack.states["ids_T"]))
            if open_shard:
                pending.append(pool.submit(finish, writer))
        keep_up(0)
    finally:
        pool.shutdown(cancel_futures=True)
        for writer in unfinished:
            writer.discard()


def read_pack(target: Target[Any], sequences: Sequence[Encoded], is_float8: bool) -> Pack:
    """Have the target read sequences together; nothing waits for a GPU."""
    ids_N = torch.cat([sequence.ids_T for sequence in sequences])
    loss_mask_N = torch.cat([sequence.loss_mask_T for sequence in sequences])
    _, output = target.prefill([sequence.ids_T for sequence in sequences])
    taps_NLD, last_hidden_ND = output.taps_NLD, output.last_hidden_ND
    # Position 0 of a sequence is never predicted, so the shifted mask does not reach across a border.
    rows_M = loss_mask_N.roll(-1).nonzero()[:, 0]
    hidden_MD = last_hidden_ND[onto(last_hidden_ND.device, rows_M)]
    states = {"taps_TLD": taps_NLD, "last_hidden_MD": hidden_MD}
    states |= judge(target, hidden_MD, onto(last_hidden_ND.device, ids_N[rows_M + 1]))
    is_finite = taps_NLD.isfinite().all() & last_hidden_ND.isfinite().all()
    if is_float8:
        states["taps_TLD"], states["tap_scales_TL"] = to_float8(taps_NLD)
    here = {name: _to_host(values) for name, values in (states | {"is_finite": is_finite}).items()}
    arrived = torch.cuda.current_stream().record_event() if taps_NLD.is_cuda else None
    here |= {"ids_T": ids_N.int(), "loss_mask_T": loss_mask_N}
    return Pack(sequences, here, here.pop("is_finite"), arrived)


def judge(target: Target[Any], hidden_MD: Tensor, labels_M: Tensor) -> dict[str, Tensor]:
    """label_logprobs_M, what the target's head gives the labels, and entropies_M; float32, where the states lie."""
    found = []
    parts = (torch.split(rows, LOGIT_ROWS) for rows in (hidden_MD, labels_M))
    for hidden_ND, labels_N in zip(*parts, strict=True):
        logprobs_NV = torch.log_softmax(target.logits(hidden_ND), -1)
        entropies_N = -(logprobs_NV.exp() * logprobs_NV).sum(-1)
        found.append(torch.stack((logprobs_NV.gather(1, labels_N[:, None])[:, 0], entropies_N)).float())
    label_logprobs_M, entropies_M = torch.cat(found, 1)
    return {"label_logprobs_M": label_logprobs_M, "entropies_M": entropies_M}


def _to_host(values: Tensor) -> Tensor:
    """On its way into pinned memory, which torch keeps and lends again."""
    if not values.is_cuda:
        return values
    return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)


def _write(writer: ShardWriter, pack: Pack) -> None:
    if pack.arrived:
        pack.arrived.synchronize()
    if not pack.is_finite:
        raise RecordError(
            f"{pack.sequences[0].place}: the target's states are not finite in this sequence or in the "
            f"{len(pack.sequences) - 1} read with it; check its weights, or set target.dtype to float32"
        )
    sizes = [len(each.ids_T) for each in pack.sequences], [each.num_supervised for each in pack.sequences]
    parts = {name: torch.split(values, sizes["_M" in name]) for name, values in pack.states.items()}
    for place in range(len(pack.sequences)):
        writer.add({name: values[place] for name, values in parts.items()})
