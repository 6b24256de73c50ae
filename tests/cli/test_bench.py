"""dspark bench verify: what it refuses, what it ships, and (on a GPU) what it writes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from ranking import TenMicroseconds, measure_on_cpus
from safetensors.torch import save_file
from typer.testing import CliRunner

from dspark.cli.bench import Job
from dspark.cli.main import app
from dspark.errors import ConfigError, DsparkError
from dspark.target.loading import NANO_FOLDER
from dspark.verifier.ranks import start

WHOLE = "the whole model on one GPU"


def run(*arguments: str) -> BaseException | None:
    result = CliRunner().invoke(app, ["bench", "verify", *arguments])
    assert result.exit_code == 0 or result.exception, result.output
    return result.exception


def test_without_a_gpu_it_says_so_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    error = run("--target", "ling-3.0-flash", "--emulate-tp", "4")
    assert isinstance(error, DsparkError)
    assert "needs a CUDA GPU" in str(error)
    assert "\n" not in str(error)


def test_other_windows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for tokens in ("0", "17", "9,x", ""):
        error = run("--target", "ling-3.0-flash", "--tokens", tokens)
        assert isinstance(error, ConfigError), error
        assert "numbers in 1..16" in str(error)


def test_windows_longer_than_the_draft_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("a GPU was looked for"))
    error = run("--target", "ling-3.0-flash", "--tokens", "9,16", "--draft", "dspark")
    assert isinstance(error, ConfigError)
    assert "are 9 at most" in str(error)


def test_what_cannot_be_float32_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: pytest.fail("a GPU was looked for"))
    for names in ("experts", "router,embedding", "router,", "Head"):
        error = run("--target", "ling-3.0-flash", "--float32", names)
        assert isinstance(error, ConfigError), error
        assert "float32 is router and head, got" in str(error)
        assert "\n" not in str(error)


def test_weights_of_another_target_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    error = run("--target", "ling-3.0-tiny", "--weights", str(NANO_FOLDER))
    assert isinstance(error, ConfigError)
    assert "is not that of ling-3.0-tiny" in str(error)


def test_ranks_that_cannot_be_had_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    error = run("--target", "ling-3.0-flash", "--tp", "2")
    assert isinstance(error, DsparkError)
    assert str(error).startswith("--tp 2: found 1 GPU; use fewer ranks")
    error = run("--target", "ling-3.0-flash", "--tp", "2", "--emulate-tp", "2")
    assert isinstance(error, ConfigError)
    assert "give only one" in str(error)


def test_a_trace_is_handed_on_and_another_is_refused_before_the_gpu_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Job] = []
    monkeypatch.setattr("dspark.cli.bench.run", lambda ranks, job: jobs.append(job))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not jobs)
    path = write_trace(tmp_path, torch.arange(8).repeat(8, 40, 1))
    given = ["--target", "ling-3.0-flash", "--routing", path, "--tokens"]
    assert run(*given, "8,1") is None
    assert [(job.routing, job.windows) for job in jobs] == [(path, (8, 1))]
    error = run(*given, "1,9")
    assert isinstance(error, ConfigError)
    assert "9 tokens or more, 40 MoE layers, 8 picks], found torch.int64 [8, 40, 8]" in str(error)


def write_trace(folder: Path, ids_NLK: torch.Tensor) -> str:
    save_file({"expert_ids": ids_NLK}, folder / "trace.safetensors")
    return str(folder / "trace.safetensors")


def bench(path: Path, *arguments: str) -> dict[str, Any]:
    sizes = ["--target", "ling-3.0-nano", "--tokens", "1,9", "--context", "100", "--json", str(path)]
    assert run(*sizes, *arguments) is None
    report = json.loads(path.read_text())
    label = "one rank of 2, communication left out" if "2" in arguments else WHOLE
    is_wide = "--float32" in arguments
    assert report["label"] == label + ("; head and router in float32" if is_wide else "")
    assert report["float32"] == (["head", "router"] if is_wide else [])
    assert [window["tokens"] for window in report["windows"]] == [1, 9]
    for window in report["windows"]:
        assert window["is_chained_equal"]
        for kind in ("plain", "chained"):
            assert window[kind]["is_finite"]
            assert window[kind]["is_replay_equal"]
    assert report["routing"] == ("its own" if "--weights" in arguments else "uniform")
    return report


@pytest.mark.parametrize(
    "arguments",
    [["--weights", str(NANO_FOLDER), "--draft", "mtp", "--float32", "router,head"], ["--emulate-tp", "2"]],
)
def test_every_stage_of_a_step_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr("dspark.cli.bench.DEVICE", "cpu")
    monkeypatch.setattr("dspark.cli.bench.Clock", TenMicroseconds)
    monkeypatch.setattr("dspark.cli.bench.read_bandwidth", lambda clock, free_bytes: 1e12)
    monkeypatch.setattr("dspark.verifier.timing.prefill.SIDE", 8)
    report = bench(tmp_path / "new" / "out.json", *arguments, "--prefill", "40")
    assert report["prefill"]["tokens"] == 40
    assert report["prefill"]["microseconds_1"] == report["prefill"]["microseconds_8"] == 10.0
    assert report["prefill"]["matmul_flops_per_second"] == pytest.approx(2 * 8**3 / 10e-6)
    for window in report["windows"]:
        assert "trace" not in window
        for kind in ("plain", "chained"):
            found, stages = window[kind], {stage["name"]: stage for stage in window[kind]["stages"]}
            assert len(found["distinct_experts"]) == 7
            assert {"KDA verify", "MLA attention", "MoE up", "Head and arg-max", "KDA commit"} <= stages.keys()
            assert stages["KDA in-projection"]["num_calls"] == 6
            assert found["moe_pair_microseconds"] == pytest.approx(2 * 10.0 / (2 * stages["MoE up"]["num_calls"]))
            assert found["num_bytes"] == sum(s["num_bytes"] * s["num_calls"] for s in stages.values())
            assert found["floor_microseconds"] == pytest.approx(found["num_bytes"] / 1e6)
        cycles = [window[key] for key in window if key.startswith("cycle")]
        assert len(cycles) == (2 if "mtp" in arguments and window["tokens"] == 9 else 0)
        for cycle in cycles:
            assert cycle["parts"].keys() == {"draft", "verify", "commit", "update"}
            assert {"Draft all-reduce and norm", "Draft head"} & {stage["name"] for stage in cycle["stages"]}


@pytest.mark.usefixtures("ranks_of_a_server")
def test_ranks_write_one_report_with_their_communication(tmp_path: Path) -> None:
    trace = write_trace(tmp_path, torch.arange(8).view(2, 1, 4).repeat(8, 7, 1))  # 0 to 3 and 4 to 7 in turn
    start(partial(measure_on_cpus, path=tmp_path / "out.json", routing=trace), 2, "cpu", 120.0)
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["routing"] == trace
    assert report["label"] == "2 ranks with communication, seen by the first"
    for window in report["windows"]:
        calls = {stage["name"]: stage["num_calls"] for stage in window["chained"]["stages"]}
        assert calls["Attention all-reduce and norm"] == 8
        assert calls["MoE all-reduce and norm"] + calls["Dense MLP all-reduce and norm"] == 8
        assert calls["Arg-max exchange"] == 2
        assert window["trace"]["mean"] == {1: 5, 3: 9}[window["tokens"]]
        assert window["plain"]["distinct_experts"] == [window["trace"]["mean"]] * 7
        assert window["chained"]["is_replay_equal"]
        assert window["is_chained_equal"]
    stages = {stage["name"] for stage in report["windows"][1]["cycle_temperature_0"]["stages"]}
    assert {"Draft exchange", "Arg-max exchange"} <= stages


@pytest.mark.skipif(not torch.cuda.is_available(), reason="times a GPU")
@pytest.mark.parametrize("arguments", [["--weights", str(NANO_FOLDER)], ["--emulate-tp", "2"]])
def test_on_a_gpu_launches_are_counted_and_times_are_positive(tmp_path: Path, arguments: list[str]) -> None:
    for window in bench(tmp_path / "out.json", *arguments)["windows"]:
        for kind in ("plain", "chained"):
            assert window[kind]["num_launches"] > 0
            assert all(stage["microseconds"] > 0 for stage in window[kind]["stages"])
