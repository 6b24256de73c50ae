"""dspark plan: its bytes are those of the record made afterwards, its times those of the rates; what no disk holds, or
no stated rate explains, is refused.
"""

import json
import re
import sys
from collections import namedtuple
from collections.abc import Iterator
from datetime import timedelta
from math import ceil
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import yaml
from accelerate.state import AcceleratorState
from prompts_run import write_prompts_run
from typer.testing import CliRunner

from dspark.cli.main import app, main
from dspark.cli.plan import stages
from dspark.cli.prepare import prepare
from dspark.cli.record import record
from dspark.config import load_run
from dspark.errors import ConfigError
from dspark.record import writer
from dspark.target.loading import load_target

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
ROWS: list[dict[str, Any]] = [{"prompt": f"Add {number} and {'2' * number}."} for number in range(1, 7)]
STAGES = ("prepare", "record", "train", "eval")
USAGE = namedtuple("USAGE", "total used free")


@pytest.fixture(autouse=True)
def _a_fresh_accelerate(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def plan(config: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["plan", "--config", str(config), *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def table(output: str) -> dict[str, list[str]]:
    """Of every stage: tokens, GB on the disk, GPU-hours, time, GB of memory."""
    lines = [line.split() for line in output.splitlines()]
    found = {words[0]: words[1:] for words in lines if words and words[0] in STAGES}
    assert list(map(len, found.values())) == [5] * len(STAGES)
    return found


def overriding(*settings: str) -> list[str]:
    return [word for text in settings for word in ("--set", text)]


def write_run(folder: Path, *rows: dict[str, Any]) -> Path:
    """A run on these rows, whose evaluation has as many prompts."""
    config = write_prompts_run(folder, *rows)
    fields = yaml.safe_load(config.read_text())
    fields["eval"] = {"tasks": fields["data"]["sources"], "max_new_tokens": 7}
    config.write_text(yaml.safe_dump(fields))
    return config


def test_the_bytes_before_and_after_the_answers_are_those_of_the_record(tmp_path: Path) -> None:
    settings = ["data.max_conversations=3", "data.max_response_tokens=12", "data.temperatures=[1,0.9]"]
    folder = tmp_path / "record"
    prepare(DEMO, [*settings, f"record.folder={folder}"])
    rows = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
    mean, text_bytes = sum(len(row["response_ids"]) for row in rows) / 6, (folder / "responses.jsonl").stat().st_size
    for taps in ("target", "float8"):
        copytree(folder, tmp_path / taps)
        given = [*settings, f"record.taps={taps}", f"record.folder={tmp_path / taps}"]
        fresh = overriding(*given[:-1], f"record.folder={tmp_path / 'fresh'}")
        before = plan(DEMO, *fresh, "--response-tokens", str(mean))
        after = plan(DEMO, *overriding(*given))
        assert "3 conversations counted, 3 sampled, 0 unusable" in before
        assert "6 sequences" in before
        assert "exact" in after
        assert "dspark prepare" not in after
        record(DEMO, given)
        found = sum(path.stat().st_size for path in (tmp_path / taps).glob("shard-*"))
        for said in (before, after):
            assert float(table(said)["record"][1]) * 1e9 == pytest.approx(found, rel=0.02)
        assert float(table(before)["prepare"][1]) * 1e9 == pytest.approx(2.5 * text_bytes, rel=0.3)
        assert table(after)["prepare"][:2] == ["0", "0"]


def test_times_are_tokens_by_rates_and_there_are_none_without(tmp_path: Path) -> None:
    config, rates = write_run(tmp_path, *ROWS), tmp_path / "rates.yaml"
    bare = plan(config)
    assert "no times without rates" in bare
    assert "an answer 40 tokens, at most, data.max_response_tokens" in bare
    assert {row[2] for row in table(bare).values()} == {"-"}
    stated = {"num_gpus": 2, "prepare_tokens_per_second": 0.05, "train_tokens_per_second": 1, "response_tokens": 30}
    rates.write_text(yaml.safe_dump(stated))
    told = plan(config, "--rates", str(rates))
    found = table(told)
    assert found["prepare"][0] == str(6 * 30)
    assert found["prepare"][2:4] == ["1", "1:00:00"]
    assert (found["record"][2], found["eval"][2]) == ("-", "-")
    trained = int(found["train"][0].replace(",", ""))
    assert trained == round(10 * 4 * 2 * int(found["record"][0]) / 6)
    assert float(found["train"][2]) == pytest.approx(trained / 3600, rel=1e-3)
    assert found["train"][3] == str(timedelta(seconds=ceil(trained / 2)))
    assert found["eval"][0] == str(6 * 2 * 7)
    assert "13.33 epochs on 2 processes" in told
    shorter = table(plan(config, "--rates", str(rates), "--response-tokens", "15"))
    assert shorter["prepare"][2:4] == ["0.5", "0:30:00"]
    ring = plan(config, "--rates", str(rates), *overriding("record.ring_shards=1", "record.shard_tokens=80"))
    assert table(ring)["record"][0] == found["train"][0]
    share = 80 / int(found["record"][0])
    assert float(table(ring)["record"][1]) == pytest.approx(share * float(found["record"][1]), rel=0.01)
    assert re.search("dspark record .* &\n", ring)


def test_a_calibration_says_rates_that_can_be_stated_later(tmp_path: Path) -> None:
    config = write_run(tmp_path, *ROWS)
    output = plan(config, "--calibrate", "0.8", "--device", "cpu")
    lines = [line for line in output.splitlines() if re.match(r"num_gpus|\w+_tokens(_per_second)?: ", line)]
    (tmp_path / "rates.yaml").write_text("\n".join(lines))
    rates = yaml.safe_load("\n".join(lines))
    assert all(rates[f"{stage}_tokens_per_second"] > 1 for stage in STAGES)
    assert table(plan(config, "--rates", str(tmp_path / "rates.yaml"))) == table(output)
    assert not (tmp_path / "record").exists()


def test_a_rate_that_nobody_knows_is_refused(tmp_path: Path) -> None:
    config, rates = write_run(tmp_path, *ROWS), tmp_path / "rates.yaml"
    rates.write_text("record_tokens_a_second: 3\n")
    with pytest.raises(ConfigError, match=r"rates.yaml: record_tokens_a_second is not a known key"):
        plan(config, "--rates", str(rates))
    for length in ("41", "inf"):
        with pytest.raises(ConfigError, match=f"response_tokens is {length}, above data.max_response_tokens"):
            plan(config, "--response-tokens", length)


def test_a_disk_that_is_too_small_is_refused_in_one_line_and_no_command_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path, *ROWS)
    needed = sum(float(table(plan(config))[stage][1]) for stage in ("prepare", "record")) * 1e9
    monkeypatch.setattr(sys, "argv", ["dspark", "plan", "--config", str(config)])
    monkeypatch.setattr(writer, "disk_usage", lambda _: USAGE(0, 0, needed * 1.01))
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code in {0, None}
    capsys.readouterr()
    monkeypatch.setattr(writer, "disk_usage", lambda _: USAGE(0, 0, needed * 0.99))
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    told = capsys.readouterr()
    assert re.fullmatch(
        r"dspark: .*record: prepare and record need .* are free; give this run another record.folder.*\n", told.err
    )
    assert "dspark prepare" not in told.out


def test_the_commands_come_in_order_with_what_was_overridden(tmp_path: Path) -> None:
    config, rates = write_run(tmp_path, *ROWS, {"messages": []}), tmp_path / "rates.yaml"
    settings = overriding("data.max_conversations=7", "eval.temperatures=[0, 1]")
    told = plan(config, *settings).splitlines()[-5:]
    given = f"--config {config} --set data.max_conversations=7 --set 'eval.temperatures=[0, 1]'"
    assert told == [
        f"dspark prepare {given} --leave-out-unusable",
        f"dspark record {given} --leave-out-unusable",
        f"accelerate launch train.py {given}",
        f"dspark eval {given} --out {tmp_path / 'eval'}",
        f"dspark export --run {tmp_path / 'run'} --out {tmp_path / 'export'}",
    ]
    rates.write_text("num_gpus: 3")
    assert "accelerate launch --config_file configs/accelerate/multi_gpu.yaml --num_processes 3 train.py" in plan(
        config, "--rates", str(rates)
    )


def test_a_mixture_is_counted_as_prepare_makes_it(tmp_path: Path) -> None:
    config = write_run(tmp_path, *ROWS, ROWS[0])
    mixture = {"sources": [str(tmp_path / "rows.jsonl")], "near_similarity": None}
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(mixture))
    assert "6 sequences" in plan(config, *overriding(f"data.sources=[{tmp_path / 'mixture.yaml'}]"))


def test_memory_is_that_of_weights_and_ranks_divide_the_target(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, *ROWS))
    target = load_target(tmp_path / "target")
    loaded = sum(tensor.nbytes for tensor in target.state_dict().values())  # type: ignore[attr-defined]
    manifest, _ = stages.expect_record(run, *stages.sample_prompts(run, tmp_path / "target"), 9)
    here = stages.plan_stages(run, tmp_path / "target", manifest, 0, 3, "cpu")
    there = stages.plan_stages(run, tmp_path / "target", manifest, 0, 3, "cuda")
    assert [here[0].memory_bytes, here[1].memory_bytes] == pytest.approx([loaded, loaded], rel=0.01)
    assert [each.num_gpus for each in here] == [1, 1, 3, 1]
    assert [each.num_gpus for each in there] == [1, 2, 3, 2]  # three ranks do not divide it
    assert there[1].memory_bytes > 10**9  # what a GPU's context and graphs take
