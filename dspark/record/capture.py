"""The target runs teacher-forced over the sequences, and what it says goes to the disk while it runs on."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import islice, zip_longest

import torch
from torch import Tensor

from dspark.data.chat import Encoded
from dspark.errors import RecordError
from dspark.kernels.transfer import onto
from dspark.layers.float8 import to_float8
from dspark.record.format import Manifest, group_by_tokens
from dspark.record.leases import Leases
from dspark.record.writer import ShardWriter
from dspark.types import Reading
from dspark.verifier.plan import LOGIT_ROWS

TOKENS_PER_CALL = 8192
"""Tokens that the target reads at once, several sequences packed. Part of the format: it may move roundings."""
PACKS_WAITING, SHARDS_AT_ONCE, WRITERS = 2, 2, 4
"""Calls whose states wait to be written (the target waits only behind them), shards that are written at a time and
others that wait to be flushed, and threads: a file takes some two GB a second, and a target may say more."""
OpenShard = Callable[[int, Sequence[tuple[int, int]]], ShardWriter]
"""A shard's number, tokens and predicted ones of its sequences -> what writes it."""


@dataclass(frozen=True)
class Pack:
    """What the target says about sequences that it read together, under way to the host: the fields of ``format`` over
    all their tokens and all their predicted ones, is_finite bool []. ``arrived`` is the event to wait for on a GPU.
    """

    sequences: Sequence[Encoded]
    states: dict[str, Tensor]
    is_finite: Tensor
    arrived: torch.cuda.Event | None

    @cached_property
    def parts(self) -> dict[str, tuple[Tensor, ...]]:
        """Each field, sequence by sequence."""
        sizes = [len(each.ids_T) for each in self.sequences], [each.num_supervised for each in self.sequences]
        return {name: torch.split(values, sizes["_M" in name]) for name, values in self.states.items()}


def take_turns(
    missing: Callable[[], list[int] | None], leases: Leases, poll_seconds: float = 0.2
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
    target: Reading,
    sequences: Sequence[Encoded],
    manifest: Manifest,
    shards: Iterable[int | None],
    open_shard: OpenShard | None,
    on_sequences: Callable[[int, int], None],
) -> None:
    """Record ``shards`` (None: nothing to do for the moment) of ``sequences``, which are in the record's order.

    What goes into a shard depends on nothing outside it: a run that was stopped and started again, or another machine,
    writes the same bytes. Threads write, at most ``PACKS_WAITING`` calls behind the target, and another one waits for
    the disk. ``open_shard`` is None on ranks that only help to compute. ``on_sequences`` is told how many sequences and
    tokens were read.
    Raises: RecordError naming the first sequence of a pack with states not finite, or when the disk refuses.
    """
    threads = _WritingThreads()

    def read_shard(index: int) -> Iterator[None]:
        members = [sequences[place] for place in range(*manifest.starts[index : index + 2])]
        lengths, writer = [len(each.ids_T) for each in members], None
        if open_shard:
            writer = open_shard(index, list(zip(lengths, (each.num_supervised for each in members), strict=True)))
            threads.writes[writer] = []
        for group in group_by_tokens(lengths, TOKENS_PER_CALL):
            pack = read_pack(target, members[group.start : group.stop], manifest.taps == "float8")
            if writer:
                threads.write(writer, group, pack)
            on_sequences(len(group), len(pack.states["ids_T"]))
            yield
        if writer:
            threads.finish(writer)

    try:
        turns = iter(shards)
        while several := list(islice(turns, SHARDS_AT_ONCE)):
            indices = [index for index in several if index is not None]
            for _ in zip_longest(*map(read_shard, indices)):  # a pack of each in turn
                continue
            if not indices:
                threads.keep_up(0, 0)
        threads.keep_up(0, 0)
    finally:
        threads.end()


class _WritingThreads:
    """They bring packs to the disk, and another one waits for it, pack by pack: a shard that is whole is there soon."""

    def __init__(self) -> None:
        self.pool, self.finisher = ThreadPoolExecutor(WRITERS), ThreadPoolExecutor(1)
        self.pending, self.finishing = deque[list[Future[None]]](), deque[Future[None]]()
        self.writes: dict[ShardWriter, list[Future[None]]] = {}
        """Of the shards that have no name yet."""

    def write(self, writer: ShardWriter, rows: range, pack: Pack) -> None:
        writes = [self.pool.submit(_write, writer, row, pack, rows.start) for row in rows]
        self.pending.append(writes)
        self.writes[writer] += [*writes, self.finisher.submit(_flush, writer, writes)]
        writer.leases.touch(writer.index)
        self.keep_up(PACKS_WAITING, SHARDS_AT_ONCE)

    def finish(self, writer: ShardWriter) -> None:
        def when_written() -> None:
            for write in self.writes[writer]:
                write.result()
            writer.finish()
            del self.writes[writer]

        self.finishing.append(self.finisher.submit(when_written))

    def keep_up(self, most_packs: int, most_shards: int) -> None:
        """Wait until no more than so many are under way. Raises: what the threads met."""
        while len(self.pending) > most_packs:
            for write in self.pending.popleft():
                write.result()
        while len(self.finishing) > most_shards:
            self.finishing.popleft().result()

    def end(self) -> None:
        for each in (self.pool, self.finisher):
            each.shutdown(cancel_futures=True)
        for writer in self.writes:
            writer.discard()


def read_pack(target: Reading, sequences: Sequence[Encoded], is_float8: bool) -> Pack:
    """Have the target read sequences together; nothing waits for a GPU."""
    ids_N = torch.cat([sequence.ids_T for sequence in sequences])
    loss_mask_N = torch.cat([sequence.loss_mask_T for sequence in sequences])
    _, output = target.prefill([sequence.ids_T for sequence in sequences])
    taps_NLD, last_hidden_ND = output.taps_NLD, output.last_hidden_ND
    # Position 0 of a sequence is never predicted, so the shifted mask does not reach across a border.
    rows_M = loss_mask_N.roll(-1).nonzero()[:, 0]
    hidden_MD = last_hidden_ND[onto(last_hidden_ND.device, rows_M)]
    is_finite = taps_NLD.isfinite().all() & last_hidden_ND.isfinite().all()
    states = {"taps_TLD": taps_NLD, "last_hidden_MD": hidden_MD, "is_finite": is_finite}
    if is_float8:
        states["taps_TLD"], states["tap_scales_TL"] = to_float8(taps_NLD)
    states |= judge(target, hidden_MD, onto(last_hidden_ND.device, ids_N[rows_M + 1]))
    here, arrived = _to_host(states) if taps_NLD.is_cuda else (states, None)
    here |= {"ids_T": ids_N.int(), "loss_mask_T": loss_mask_N}
    return Pack(sequences, here, here.pop("is_finite"), arrived)


def judge(target: Reading, hidden_MD: Tensor, labels_M: Tensor) -> dict[str, Tensor]:
    """label_logprobs_M, what the target's head gives the labels, and entropies_M; float32, where the states lie."""
    score = _fused_scores() if hidden_MD.is_cuda else _scores
    parts = (torch.split(rows, LOGIT_ROWS) for rows in (hidden_MD, labels_M))
    found = [score(target.logits(hidden_ND), labels_N) for hidden_ND, labels_N in zip(*parts, strict=True)]
    label_logprobs_M, entropies_M = torch.cat(found, 1).float()
    return {"label_logprobs_M": label_logprobs_M, "entropies_M": entropies_M}


def _scores(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    """Log-probabilities of the labels and entropies [2, N]."""
    logprobs_NV = logits_NV - logits_NV.logsumexp(-1, keepdim=True)
    probs_NV = logprobs_NV.exp()
    entropies_N = -torch.where(probs_NV > 0, probs_NV * logprobs_NV, 0.0).sum(-1)  # a masked row's logit may be -inf
    return torch.stack((logprobs_NV.gather(1, labels_N[:, None])[:, 0], entropies_N))


@cache
def _fused_scores() -> Callable[[Tensor, Tensor], Tensor]:
    """The same, which reads the logits twice and writes none."""
    compiled: Callable[[Tensor, Tensor], Tensor] = torch.compile(_scores, dynamic=True)
    return compiled


def _to_host(states: dict[str, Tensor]) -> tuple[dict[str, Tensor], torch.cuda.Event]:
    """On their way beside the target's next work, into pinned memory, which torch keeps and lends again."""
    device = states["taps_TLD"].device
    main, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(main)
    here = {name: torch.empty(x.shape, dtype=x.dtype, pin_memory=True) for name, x in states.items()}
    with torch.cuda.stream(side):
        for name, values in states.items():
            here[name].copy_(values, non_blocking=True)
            values.record_stream(side)
    return here, side.record_event()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _write(writer: ShardWriter, row: int, pack: Pack, first_row: int) -> None:
    """One sequence of a pack whose first one is ``first_row`` of the shard."""
    if pack.arrived:
        pack.arrived.synchronize()
    if not pack.is_finite:
        where = f"in this sequence or in the {len(pack.sequences) - 1} read with it"
        fault = f"the target's states are not finite {where}; check its weights, or set target.dtype to float32"
        raise RecordError(f"{pack.sequences[0].place}: {fault}")
    place = row - first_row
    writer.add(row, {name: parts[place] for name, parts in pack.parts.items()})


def _flush(writer: ShardWriter, writes: Sequence[Future[None]]) -> None:
    """To the disk, once they are done; a refusal is told here alone, the flush behind the shard would not repeat it."""
    for write in writes:
        write.result()
    writer.flush()
