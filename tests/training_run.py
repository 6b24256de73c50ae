"""A small run for the training tests: a target folder, a record of made-up states, the run on it, how two compare."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from recorded import digest
from safetensors.torch import load_file
from tiny import MASK_TOKEN_ID, VOCAB_SIZE, write_tiny_ling
from torch import Tensor

from dspark.config import RunConfig
from dspark.distributed import start_accelerator
from dspark.record.format import Manifest, plan_shards
from dspark.record.leases import Leases
from dspark.record.order import ReadingOrder
from dspark.record.writer import ShardWriter, start_record
from dspark.target.loading import target_fingerprint
from dspark.train.batches import CPU, Batch, Draw, Record, Share, copied_ahead, fill, plan_batch, window_draws
from dspark.train.objective import Metrics
from dspark.train.setup import fresh_draft, prepare
from dspark.train.step import Learner, train_step
from dspark.types import RecordedSequence

WIDTH, TAPS = 32, (0, 2, 4)
ROOT = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
LAST = "checkpoints/step-00000010"
LENGTHS = (19, 40, 26, 33, 12, 28, 37)


class Sequences(list[RecordedSequence]):
    """A record in memory."""

    @property
    def starts(self) -> list[int]:
        """As of a record of one shard."""
        return [0, len(self)]

    def text(self, index: int) -> tuple[Tensor, Tensor]:
        """As of a record."""
        return self[index].ids_T, self[index].loss_mask_T


def read_batch(record: Record, draws: Sequence[Draw], run: RunConfig, device: torch.device = CPU) -> Batch:
    """Planned and filled."""
    return fill(record, plan_batch(record, draws, run, device), device)


def draws_of(record: Record, seed: int, start: int, share: Share) -> list[list[Draw]]:
    """Of the step after ``start`` sequences."""
    return window_draws(ReadingOrder(record.starts, seed), start, share)


def read_window(record: Record, run: RunConfig, start: int, share: Share, device: torch.device = CPU) -> list[Batch]:
    """Of the step after ``start`` sequences."""
    return [read_batch(record, each, run, device) for each in draws_of(record, run.seed, start, share)]


def ready(batch: Batch) -> Future[Batch]:
    """A batch that is read already, as ``copied_ahead`` takes it."""
    future = Future[Batch]()
    future.set_result(batch)
    return future


def take_step(learner: Learner, window: Sequence[Batch], step: int) -> Metrics:
    """A step on batches that are read already."""
    return train_step(learner, window, step, copied_ahead(map(ready, window), learner.accelerator.device))


def make_sequences(seed: int = 0, lengths: Sequence[int] = LENGTHS) -> Sequences:
    """Sequences of several lengths whose supervised parts differ a lot; the states are random."""
    generator = torch.Generator().manual_seed(seed)
    sequences = Sequences()
    for number, length in enumerate(lengths):
        loss_mask_T = torch.arange(length) >= (3 if number % 2 else length - 6)
        last_hidden_TD = torch.randn(length, WIDTH, generator=generator)
        last_hidden_TD[:-1][~loss_mask_T[1:]] = 0
        last_hidden_TD[-1] = 0
        ids_T = torch.randint(0, 300, (length,), generator=generator)
        taps_TLD = torch.randn(length, len(TAPS), WIDTH, generator=generator)
        sequences.append(RecordedSequence(ids_T, loss_mask_T, taps_TLD, last_hidden_TD))
    return sequences


def write_record(folder: Path, target: Path, sequences: list[RecordedSequence]) -> None:
    """Store the sequences as ``dspark record`` would, in one shard."""
    lengths = [len(sequence.ids_T) for sequence in sequences]
    sizes = lengths, [int(sequence.loss_mask_T.sum()) for sequence in sequences]
    description = Manifest(
        target=target.name,
        target_fingerprint=target_fingerprint(target),
        tokenizer_fingerprint="0" * 64,
        target_layer_ids=TAPS,
        hidden_size=WIDTH,
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        answers="target",
        thinking=(False,),
        temperatures=(1.0,),
        text_sha256=digest(part for each in sequences for part in (each.ids_T, each.loss_mask_T)),
        shard_tokens=sum(lengths),
        shards=plan_shards(*sizes, sum(lengths)),
    )
    start_record(folder, description)
    writer = ShardWriter(folder, description, Leases(folder), 0, list(zip(*sizes, strict=True)))
    for row, (sequence, num_supervised) in enumerate(zip(sequences, sizes[1], strict=True)):
        fields = {"ids_T": sequence.ids_T.int(), "loss_mask_T": sequence.loss_mask_T, "taps_TLD": sequence.taps_TLD}
        fields["last_hidden_MD"] = sequence.last_hidden_TD[:-1][sequence.loss_mask_T[1:]]
        writer.add(row, fields | dict.fromkeys(("label_logprobs_M", "entropies_M"), torch.zeros(num_supervised)))
    writer.finish()


def run_fields(folder: Path, **train: Any) -> dict[str, Any]:
    """A whole run as YAML would hold it; ``train`` changes fields of its train section."""
    section = {
        "folder": str(folder / "run"),
        "steps": 10,
        "batch_size": 1,
        "accumulation_steps": 4,
        "num_anchors": 6,
        "learning_rate": 3e-3,
        "save_every_steps": 5,
        "log_every_steps": 2,
    }
    return {
        "name": "test",
        "target": {"path": str(folder / "target"), "dtype": "float32"},
        "data": {"sources": ["none.jsonl"]},
        "record": {"folder": str(folder / "record"), "max_tokens": 256},
        "draft": {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": WIDTH,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "max_position_embeddings": 512,
            "num_target_layers": 6,
            "target_layer_ids": list(TAPS),
            "block_size": 4,
            "mask_token_id": MASK_TOKEN_ID,
            "markov_rank": 8,
        },
        "objective": {"acceptance_warmup_steps": 3, "cross_entropy": 0.1},
        "train": section | train,
        "eval": {"tasks": ["none"]},
    }


def make_run(folder: Path, **train: Any) -> RunConfig:
    """``run_fields`` as the program sees them."""
    return RunConfig.model_validate(run_fields(folder, **train))


def make_learner(folder: Path, device: str = "cpu", **train: Any) -> Learner:
    """The run's draft before its first step, with made-up tables of the target."""
    run = make_run(folder, **train)
    AcceleratorState._reset_state(reset_partial_state=True)
    draft = fresh_draft(run.draft, run.seed)
    generator = torch.Generator().manual_seed(5)
    shape = (run.draft.vocab_size, run.draft.hidden_size)
    draft.bind(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    with mock.patch.dict(os.environ, {"ACCELERATE_USE_CPU": "true"} if device == "cpu" else {}):
        accelerator = start_accelerator(run.train, {}, ())
    assert accelerator.device.type == device
    return prepare(accelerator, draft, run)


def write_run(folder: Path, **train: Any) -> Path:
    """Target, record and run.yaml on disk. Returns: the path of run.yaml."""
    target = write_tiny_ling(folder / "target")
    write_record(folder / "record", target, make_sequences())
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(run_fields(folder, **train)), encoding="utf-8")
    return path


def half_way(place: Path, folder: Path) -> list[str]:
    """The run in place/run as a kill after step 7 leaves it. Returns: the override that resumes there."""
    shutil.copytree(place / "run", folder)
    shutil.rmtree(folder / LAST)
    shutil.rmtree(folder / "draft")
    rows = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join(rows[:4]) + '\n{"step": 7, "lo')
    return [f"train.folder={folder}"]


def rows_of(folder: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.endswith(("_per_second", "_share"))} for row in rows]


def assert_same(folder: Path, expected: Path, tolerance: float) -> None:
    for file in ("draft.safetensors", "moments.safetensors"):
        found, wanted = load_file(folder / LAST / file), load_file(expected / LAST / file)
        assert found.keys() == wanted.keys()
        for name, tensor in found.items():
            torch.testing.assert_close(
                tensor, wanted[name], rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
            )
    state, wanted_state = (json.loads((each / LAST / "state.json").read_text()) for each in (folder, expected))
    assert (state["step"], state["sequences_seen"]) == (wanted_state["step"], wanted_state["sequences_seen"])
    for row, wanted_row in zip(rows_of(folder), rows_of(expected), strict=True):
        assert row == pytest.approx(wanted_row, rel=max(tolerance, 1e-12) * 100)


def launch(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "DS_"))}
    variables = inherited | {"PATH": f"{BIN}:{os.environ['PATH']}"} | environment
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=240, check=False)
