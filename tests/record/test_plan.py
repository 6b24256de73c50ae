"""The arithmetic of a plan: bytes as the format counts them, hours by the rates, memory by the sizes, what fits."""

from collections import namedtuple
from pathlib import Path

import pytest
from recorded import describe, make_sequences
from training_run import WIDTH, make_run

from dspark.errors import RecordError
from dspark.record import plan as room
from dspark.record.plan import Estimate, Facts, Rates, check_disk, estimate, record_bytes

FACTS = Facts(
    num_sequences=10,
    num_tokens=3000,
    num_supervised=1000,
    new_tokens=800,
    text_bytes=20_000,
    eval_tokens=5000,
    target_bytes=7_000_000,
    train_bytes=900_000,
    rank_bytes=4_000_000,
    num_ranks=2,
    num_parameters=50_000,
)
RATES = Rates(
    num_gpus=4,
    generate_tokens_per_second=2,
    record_tokens_per_second=30,
    train_tokens_per_second=60,
    eval_tokens_per_second=5,
)
USAGE = namedtuple("USAGE", "total used free")


def test_bytes_are_those_of_the_manifest_to_come(tmp_path: Path) -> None:
    manifest = describe(make_sequences(), target_layer_ids=(0, 2, 4), hidden_size=WIDTH)
    counts = manifest.num_sequences, manifest.num_tokens, manifest.num_supervised
    assert record_bytes(make_run(tmp_path), *counts) == manifest.num_bytes


def test_a_stage_takes_its_tokens_by_its_rate_shared_by_those_who_work_on_it(tmp_path: Path) -> None:
    prepare, record, train, evaluation = estimate(make_run(tmp_path), FACTS, RATES)
    read = 10 * 1 * 4 * 4 * 300  # steps, a micro-step's sequences, micro-steps, processes, tokens a sequence
    assert [each.num_tokens for each in (prepare, record, train, evaluation)] == [800, 3000, read, 5000]
    assert [each.seconds for each in (prepare, record, train, evaluation)] == [400, 100, read / 60, 1000]
    assert [each.num_gpus for each in (prepare, record, train, evaluation)] == [1, 1, 4, 2]
    assert [each.seconds for each in estimate(make_run(tmp_path), FACTS, Rates())] == [None] * 4


def test_memory_and_disk_are_those_of_weights_moments_and_what_is_held(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    prepare, record, train, evaluation = estimate(run, FACTS, RATES)
    assert [each.device_bytes for each in (prepare, record, train, evaluation)] == [7_000_000] * 2 + [
        900_000,
        4_000_000,
    ]
    assert (prepare.disk_bytes, record.disk_bytes) == (40_000, record_bytes(run, 10, 3000, 1000))
    assert train.disk_bytes == 50_000 * (3 * 4 * 3 + 2)
    assert record.host_bytes == 9 * 3000 + record.disk_bytes
    assert train.host_bytes == 4 * 4 * record_bytes(run, 1, 256, 256)
    other = make_run(tmp_path, optimizer="muon", ema_decay=0.9, probe_every_steps=5)
    probing = estimate(other, FACTS, RATES)[2]
    assert probing.disk_bytes == 50_000 * (3 * 4 * 3 + 2 * 2)
    assert probing.device_bytes == 7_900_000


def test_endpoints_answer_on_their_own_gpus(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    data = run.data.model_copy(update={"endpoints": ("http://one/v1",), "served_model": "it"})
    prepare = estimate(run.model_copy(update={"data": data}), FACTS, RATES)[0]
    assert (prepare.num_gpus, prepare.device_bytes, prepare.seconds) == (4, 0, 400)


def test_what_is_there_already_needs_no_room_and_what_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, estimates = tmp_path / "record", [Estimate("record", 1, 1000, 1, 0, 0, None)]
    estimates.append(Estimate("train", 1, 10**9, 1, 0, 0, None))
    monkeypatch.setattr(room, "disk_usage", lambda place: USAGE(0, 0, 900 if place == tmp_path else 10**12))
    with pytest.raises(RecordError, match=r"deep: prepare and record need 0.0 GB more, 0.0 GB are free; give another"):
        check_disk(estimates, folder / "deep")
    monkeypatch.setattr(room, "disk_usage", lambda place: USAGE(0, 0, 900))
    folder.mkdir()
    (folder / "responses.jsonl").write_bytes(bytes(500))
    with pytest.raises(RecordError):
        check_disk(estimates, folder)
    (folder / "shard-00000.safetensors").write_bytes(bytes(100))
    check_disk(estimates, folder)
