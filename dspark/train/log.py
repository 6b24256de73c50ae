"""What a run writes down while it trains: pooled metrics, where the time went, the JSONL log, one line for the eye."""

import json
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import GradBucket  # type: ignore[attr-defined]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from dspark.config import RunConfig
from dspark.distributed import sum_over_ranks
from dspark.errors import CheckpointError
from dspark.files import write_whole
from dspark.train.objective import Metrics, summed

METRICS = "metrics.jsonl"
DECODED = "decoded_acceptance_length"
KINDS = ("data_wait", "forward", "backward", "optimizer", "communication")
"""What a step's time is spent on; it is the rest that goes into rows, checkpoints and the loop itself."""
Row = dict[str, float]


def moment(device: torch.device) -> Any:
    """Now; on a GPU an event in its stream, which is still to come and has to be waited for before it is compared."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream(device).record_event(event)


def seconds_between(start: Any, end: Any) -> float:
    """The time from one moment to another of the same device."""
    return float(start.elapsed_time(end) / 1e3 if isinstance(start, torch.cuda.Event) else end - start)


class Stopwatch:
    """Laps between moments; on a GPU a moment is an event in its stream, which nobody waits for before ``read``.

    ``communication`` is known under DDP only: the rest of backward after the last bucket of gradients was sent off, and
    the sums over ranks that a step asks for. Elsewhere the exchange of gradients is a part of backward and of the
    optimizer, and those sums of the rest.
    """

    def __init__(self, device: torch.device, wrapped: nn.Module) -> None:
        self._device, self._is_gpu = device, device.type == "cuda"
        self.sees_exchange = isinstance(wrapped, DistributedDataParallel)
        if isinstance(wrapped, DistributedDataParallel):
            wrapped.register_comm_hook(wrapped.process_group, self._exchange)
        self.restart()

    def restart(self) -> None:
        """Forget all laps; the first one begins now."""
        self._laps: list[tuple[str, Any]] = [("", moment(self._device))]

    def lap(self, kind: str = "") -> None:
        """The time since the lap before went into ``kind``, by default one that is not reported."""
        self._laps.append((kind, moment(self._device)))

    def read(self) -> tuple[dict[str, float], float]:
        """Wait for the device and start anew. Returns: seconds of every kind and of all laps."""
        self.lap()
        if self._is_gpu:
            self._laps[-1][1].synchronize()
        seconds = dict.fromkeys(("", *KINDS), 0.0)
        for (_, start), (kind, end) in pairwise(self._laps):
            seconds[kind] += seconds_between(start, end)
        self._laps = self._laps[-1:]
        shown = KINDS if self.sees_exchange else KINDS[:-1]
        return {kind: seconds[kind] for kind in shown}, sum(seconds.values())

    def _exchange(self, group: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """DDP's own mean over ranks, with a lap where it is sent off: what follows the last one is a wait for it."""
        self.lap("backward")
        return allreduce_hook(group, bucket)


class PooledMetrics:
    """Numerators and denominators since the last row, divided only when steps and ranks are summed."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._sums: Metrics = {}
        self._stopwatch = stopwatch
        stopwatch.restart()

    def add(self, metrics: Metrics) -> None:
        """Add one step's pairs; nothing is read back from the device."""
        self._sums = summed((self._sums, metrics))

    def row(self, step: int, rate: float) -> Row:
        """Pool over steps and ranks and start anew; every rank calls it and gets the same row, but for its own clock.

        Besides the metrics, which are left out where nothing was counted, a row holds the steps done, the learning
        rate, ``acceptance_length`` (estimated, with the bonus token), ``tokens_per_second``, and of every kind of work
        that the stopwatch knows ``<kind>_share``, its part of the time since the last row.
        """
        seconds, total_seconds = self._stopwatch.read()
        scalar = self._sums["tokens"][0].new_tensor
        self.add({f"{kind}_share": (scalar(spent), scalar(total_seconds)) for kind, spent in seconds.items()})
        names = sorted(self._sums)
        totals_M2 = sum_over_ranks(torch.stack([torch.stack(self._sums[name]) for name in names])).tolist()
        pooled = {name: top / bottom for name, (top, bottom) in zip(names, totals_M2, strict=True) if bottom}
        del pooled["tokens"]
        tokens_per_second = totals_M2[names.index("tokens")][0] / total_seconds
        self._sums = {}
        accepted = pooled.get("expected_acceptance_ratio", 0.0)
        row = {"step": step, "learning_rate": rate, "acceptance_length": 1 + accepted}
        return row | {"tokens_per_second": tokens_per_second} | pooled


def start_trackers(accelerator: Accelerator, run: RunConfig) -> None:
    """Open wandb and TensorBoard, as the run asks, inside the run folder and with the run's fields."""
    sections = {name: part for name, part in run.model_dump(mode="json").items() if isinstance(part, dict)}
    fields = {f"{name}.{key}": value for name, part in sections.items() for key, value in part.items()}
    plain = {name: value if isinstance(value, int | float | str) else str(value) for name, value in fields.items()}
    options = {"wandb": {"dir": str(run.train.folder), "name": run.name}}
    accelerator.init_trackers("dspark", config=plain, init_kwargs=options)


def append_row(folder: Path, row: Row) -> None:
    """Add a row to the run's metrics.jsonl."""
    with (folder / METRICS).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


def drop_rows_after(folder: Path, step: int) -> None:
    """Forget the rows behind a checkpoint's step, and a last line that a crash cut short, before a run resumes.
    Raises: CheckpointError naming a line before the last that is no row.
    """
    path = folder / METRICS
    if not path.is_file():
        return
    kept = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            is_kept = json.loads(line)["step"] <= step
        except (ValueError, KeyError, TypeError) as error:
            if number < len(lines):
                raise CheckpointError(f"{path}:{number}: not a row of the log; delete this line and resume") from error
            break
        if is_kept:
            kept.append(line.decode() + "\n")
    write_whole(path, "".join(kept))


def describe(row: Row) -> str:
    """A row in one line: loss, acceptance length (and the decoded one, if any), speed, learning rate, shares."""
    shares = [f"{kind.replace('_', ' ')} {row[f'{kind}_share']:.0%}" for kind in KINDS if f"{kind}_share" in row]
    decoded = f" ({row[DECODED]:.2f} decoded)" if DECODED in row else ""
    return (
        f"step {row['step']}  loss {row['loss']:.4f}  acceptance length {row['acceptance_length']:.2f}{decoded}  "
        f"{row['tokens_per_second']:,.0f} tokens/s  learning rate {row['learning_rate']:.2e}"
        f"{'  ' * bool(shares)}{', '.join(shares)}"
    )
