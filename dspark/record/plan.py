"""What a run's stages take, bytes, memory and time: arithmetic on counts, sizes and rates that are given to it."""

from collections.abc import Sequence
from pathlib import Path
from shutil import disk_usage
from typing import Any, NamedTuple

from dspark.config import PositiveFloat, PositiveInt, RunConfig, Section
from dspark.errors import RecordError
from dspark.record.format import Manifest

CHECKPOINTS = 3
"""Of training on the disk at most: two are kept while a third is written."""
BATCHES = 4
"""Of one training process in host memory: those that threads have ready or under way, and the one in use."""
TEXT_BYTES = 9
"""Of a token in memory: its id and whether it is to be predicted."""


class Rates(Section):
    """What the hardware does: tokens a second of one GPU (or CPU process), also where several share a stage. A stage
    without a rate is given no time.
    """

    num_gpus: PositiveInt = 1
    """That train, and on which endpoints answer or the ranks of evaluation lie."""
    generate_tokens_per_second: PositiveFloat | None = None
    record_tokens_per_second: PositiveFloat | None = None
    train_tokens_per_second: PositiveFloat | None = None
    eval_tokens_per_second: PositiveFloat | None = None
    response_tokens: PositiveFloat | None = None
    """Mean length of an answer to this run's prompts."""


class Facts(NamedTuple):
    """What there is to do: the record's sequences, their tokens and those to predict; tokens that are yet to be
    answered and bytes of all answers as text; tokens that evaluation decodes at most. And bytes of the models: the
    target's weights, training on its device, one of ``num_ranks`` of evaluation; the draft's parameters, a number.
    """

    num_sequences: int
    num_tokens: int
    num_supervised: int
    new_tokens: int
    text_bytes: int
    eval_tokens: int
    target_bytes: int
    train_bytes: int
    rank_bytes: int
    num_ranks: int
    num_parameters: int


class Estimate(NamedTuple):
    """A stage: tokens, bytes on the disk at most, GPUs (or CPU processes) that share it, bytes that each of them and,
    for all, the host surely needs, tokens a second of each.
    """

    stage: str
    num_tokens: int
    disk_bytes: int
    num_gpus: int
    device_bytes: int
    host_bytes: int
    rate: float | None

    @property
    def seconds(self) -> float | None:
        """Of all GPUs together; None where no rate is known."""
        return self.num_tokens / self.rate if self.rate else None


def record_bytes(run: RunConfig, num_sequences: int, num_tokens: int, num_supervised: int) -> int:
    """Bytes of the run's record if it has so much text, as the format counts them."""
    known: dict[str, Any] = {"num_tokens": num_tokens, "num_supervised": num_supervised, "dtype": run.target.dtype}
    known |= {"target_layer_ids": run.draft.target_layer_ids, "hidden_size": run.draft.hidden_size}
    return Manifest.model_construct(num_sequences=num_sequences, **known).num_bytes


def num_read(run: RunConfig, num_processes: int) -> int:
    """Sequences that training reads in all."""
    return run.train.steps * run.train.batch_size * run.train.accumulation_steps * num_processes


def estimate(run: RunConfig, facts: Facts, rates: Rates) -> list[Estimate]:
    """Prepare, record, train and eval, in this order."""
    train, gpus, tokens = run.train, rates.num_gpus, facts.num_tokens
    recorded = record_bytes(run, facts.num_sequences, tokens, facts.num_supervised)
    texts, longest = TEXT_BYTES * tokens, train.batch_size * run.record.max_tokens
    shard = texts + round(recorded * min(1, run.record.shard_tokens / tokens))
    batches = gpus * BATCHES * record_bytes(run, train.batch_size, longest, longest)
    copies = (3 if train.optimizer == "adamw" else 2) + bool(train.ema_decay)
    saved = facts.num_parameters * (CHECKPOINTS * 4 * copies + 2 * (1 + bool(train.probe_every_steps)))
    trained = round(num_read(run, gpus) * tokens / facts.num_sequences)
    training = facts.train_bytes + facts.target_bytes * bool(train.probe_every_steps)
    asked, askers = (0, gpus) if run.data.endpoints else (facts.target_bytes, 1)
    speeds = rates.generate_tokens_per_second, rates.record_tokens_per_second, rates.train_tokens_per_second
    return [
        Estimate("prepare", facts.new_tokens, 2 * facts.text_bytes, askers, asked, texts, speeds[0]),
        Estimate("record", tokens, recorded, 1, facts.target_bytes, shard, speeds[1]),
        Estimate("train", trained, saved, gpus, training, batches, speeds[2]),
        Estimate("eval", facts.eval_tokens, 0, facts.num_ranks, facts.rank_bytes, 0, rates.eval_tokens_per_second),
    ]


def check_disk(estimates: Sequence[Estimate], folder: Path) -> None:
    """Raises: RecordError when the disk of record.folder does not hold what prepare and record have yet to write."""
    there = sum(path.stat().st_size for path in folder.glob("*") if path.suffix != ".jsonl")
    needed = sum(each.disk_bytes for each in estimates if each.stage in {"prepare", "record"}) - there
    free = disk_usage(existing(folder)).free
    if needed > free:
        raise RecordError(
            f"{folder}: prepare and record need {needed / 1e9:.1f} GB more, {free / 1e9:.1f} GB are free; give another "
            "record.folder, fewer conversations (data.max_conversations) or fewer draft.target_layer_ids"
        )


def existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that exists."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
