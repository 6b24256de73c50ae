"""dspark plan: its bytes are those of the record made afterwards, its times those of the rates; what no disk holds, no
stated rate explains or no task is, is refused.
"""

import json
import math
import re
import sys
from collections import namedtuple
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.state import AcceleratorState
from prompts_run import write_prompts_run
from safetensors.torch import load_file
from tiny import write_tiny_qwen3
from typer.testing import CliRunner

from dspark.cli.main import app, main
from dspark.cli.plan import commands
from dspark.cli.plan.facts import model_sizes
from dspark.cli.prepare import prepare
from dspark.cli.record import record
from dspark.config import load_run
from dspark.errors import ConfigError, PromptError
from dspark.record import plan as room
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
    """Of every stage: tokens, GB on the disk, GPU-hours, time, GB a GPU, GB of the host."""
    lines = [line.split() for line in output.splitlines()]
    found = {words[0]: words[1:] for words in lines if words and words[0] in STAGES}
    assert list(map(len, found.values())) == [6] * len(STAGES)
    return found


def write_run(folder: Path, *rows: dict[str, Any]) -> Path:
    """A run on these rows, whose evaluation has as many prompts."""
    config = write_prompts_run(folder, *rows)
    fields = yaml.safe_load(config.read_text())
    fields["eval"] = {"tasks": fields["data"]["sources"], "max_new_tokens": 7}
    config.write_text(yaml.safe_dump(fields))
    return config


def test_the_bytes_before_and_after_the_answers_are_those_of_the_record(tmp_path: Path) -> None:
    settings = [f"record.folder={tmp_path / 'record'}", "data.max_conversations=4", "data.max_response_tokens=12"]
    given = [word for text in settings for word in ("--set", text)]
    prepare(DEMO, settings)
    rows = [json.loads(line) for line in (tmp_path / "record" / "responses.jsonl").read_text().splitlines()]
    (tmp_path / "record").rename(tmp_path / "kept")
    mean = sum(len(row["response_ids"]) for row in rows) / len(rows)
    expected = table(plan(DEMO, *given, "--response-tokens", str(mean)))
    (tmp_path / "kept").rename(tmp_path / "record")
    text_bytes = (tmp_path / "record" / "responses.jsonl").stat().st_size
    exact = table(plan(DEMO, *given))
    record(DEMO, settings)
    found = sum(path.stat().st_size for path in (tmp_path / "record").iterdir() if "responses" not in path.name)
    for said in (expected, exact):
        assert float(said["record"][1]) * 1e9 == pytest.approx(found, rel=0.02)
    assert float(expected["prepare"][1]) * 1e9 == pytest.approx(2 * text_bytes, rel=0.3)
    assert exact["prepare"][:2] == ["0", "0"]
    assert "exact" in plan(DEMO, *given)


def test_times_are_those_of_the_rates_and_there_are_none_without(tmp_path: Path) -> None:
    config, rates = write_run(tmp_path, *ROWS), tmp_path / "rates.yaml"
    bare = plan(config)
    assert "no times without --rates or --calibrate" in bare
    assert "counted; 6 prompts sampled" in bare
    assert "an answer 40 tokens, at most, data.max_response_tokens" in bare
    assert {row[2] for row in table(bare).values()} == {"-"}
    stated = {"num_gpus": 2, "generate_tokens_per_second": 0.05, "train_tokens_per_second": 1, "response_tokens": 30}
    rates.write_text(yaml.safe_dump(stated))
    told = plan(config, "--rates", str(rates))
    found = table(told)
    assert found["prepare"][0] == str(6 * 30)
    assert (found["prepare"][2], found["prepare"][3]) == ("1", "1:00:00")
    assert (found["record"][2], found["eval"][2]) == ("-", "-")
    trained = int(found["train"][0].replace(",", ""))
    assert trained == round(10 * 4 * 2 * int(found["record"][0]) / 6)
    assert float(found["train"][2]) == pytest.approx(trained / 3600, rel=1e-3)
    assert found["train"][3] == str(timedelta(seconds=math.ceil(trained / 2)))
    assert found["eval"][0] == str(6 * 2 * 7)
    assert re.search(r"epochs: 13.33 \(80 sequences, 2 processes\)", told)
    twice = table(plan(config, "--rates", str(rates), "--response-tokens", "15"))
    assert twice["prepare"][2:4] == ["0.5", "0:30:00"]


def test_a_calibration_says_rates_that_can_be_stated_later(tmp_path: Path) -> None:
    settings = ["data.max_conversations=40", f"record.folder={tmp_path / 'record'}", "train.steps=50"]
    given = [word for text in settings for word in ("--set", text)]
    output = plan(DEMO, *given, "--calibrate", "1.5", "--device", "cpu")
    lines = [line for line in output.splitlines() if re.match(r"num_gpus|\w+_tokens(_per_second)?: ", line)]
    (tmp_path / "rates.yaml").write_text("\n".join(lines))
    rates = yaml.safe_load("\n".join(lines))
    assert all(rates[f"{stage}_tokens_per_second"] > 1 for stage in ("generate", "record", "train", "eval"))
    again = plan(DEMO, *given, "--rates", str(tmp_path / "rates.yaml"))
    if "response_tokens" in rates:
        assert 1 <= rates["response_tokens"] <= 96
        assert table(again) == table(output)
    assert not (tmp_path / "record").exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "rates.yaml"]


@pytest.mark.parametrize("key", ["record_tokens_a_second", "steps"])
def test_a_rate_that_nobody_knows_is_refused(tmp_path: Path, key: str) -> None:
    config, rates = write_run(tmp_path, *ROWS), tmp_path / "rates.yaml"
    rates.write_text(f"{key}: 3\n")
    with pytest.raises(ConfigError, match=f"rates.yaml: {key} is not a known key"):
        plan(config, "--rates", str(rates))
    with pytest.raises(ConfigError, match="--rates, --calibrate: give one of them"):
        plan(config, "--rates", str(rates), "--calibrate", "1")
    with pytest.raises(ConfigError, match=r"response_tokens is 41, above data.max_response_tokens"):
        plan(config, "--response-tokens", "41")
    for option, number in (("--response-tokens", "nan"), ("--calibrate", "nan"), ("--calibrate", "inf")):
        result = CliRunner().invoke(app, ["plan", "--config", str(config), option, number])
        assert (result.exit_code, "Invalid value" in result.output) == (2, True)
    with pytest.raises(ConfigError, match="response_tokens is inf"):
        plan(config, "--response-tokens", "inf")


def test_a_disk_that_is_too_small_is_refused_in_one_line_and_no_command_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = write_run(tmp_path, *ROWS)
    needed = sum(float(table(plan(config))[stage][1]) for stage in ("prepare", "record")) * 1e9
    monkeypatch.setattr(sys, "argv", ["dspark", "plan", "--config", str(config)])
    monkeypatch.setattr(room, "disk_usage", lambda _: USAGE(0, 0, needed * 1.01))
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code in {0, None}
    capsys.readouterr()
    monkeypatch.setattr(room, "disk_usage", lambda _: USAGE(0, 0, needed * 0.99))
    with pytest.raises(SystemExit) as error:
        main()
    assert error.value.code == 2
    told = capsys.readouterr()
    assert re.fullmatch(
        r"dspark: .*record: prepare and record need .* are free; give another record.folder.*\n", told.err
    )
    assert "dspark prepare" not in told.out


def test_the_commands_come_in_order_with_what_was_overridden(tmp_path: Path) -> None:
    config = write_run(tmp_path, *ROWS, {"messages": []})
    told = plan(config, "--set", "data.max_conversations=7", "--set", "eval.temperatures=[0, 1]").splitlines()[-5:]
    given = f"--config {config} --set data.max_conversations=7 --set 'eval.temperatures=[0, 1]'"
    assert told == [
        f"dspark prepare {given} --leave-out-unusable",
        f"dspark record {given} --leave-out-unusable",
        f"accelerate launch train.py {given}",
        f"dspark eval {given} --out {tmp_path / 'eval'}",
        f"dspark export --run {tmp_path / 'run'} --out {tmp_path / 'export'}",
    ]
    several = commands(Path("runs/a/train"), "", False, (4, 2), "cuda").splitlines()
    assert several[2] == "accelerate launch --config_file configs/accelerate/multi_gpu.yaml --num_processes 4 train.py "
    assert several[3] == "dspark eval  --tp 2 --out runs/a/eval"
    assert "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2" in commands(
        Path("a/b"), "", False, (2, 1), "cpu"
    )


def test_a_mixture_counts_as_it_says_until_it_is_made(tmp_path: Path) -> None:
    config = write_run(tmp_path, *ROWS)
    fields = yaml.safe_load(config.read_text())
    mixture: dict[str, Any] = {"sources": fields["data"]["sources"], "near_similarity": None}
    fields["data"]["sources"] = [str(tmp_path / "mixture.yaml")]
    config.write_text(yaml.safe_dump(fields))
    for number, words in ((4, "the mixture's num_rows"), (None, "at most: rows unmixed")):
        (tmp_path / "mixture.yaml").write_text(yaml.safe_dump(mixture | {"num_rows": number}))
        assert f"{number or 6} sequences" in (told := plan(config))
        assert words in told
    made = tmp_path / "record" / "prompts"
    made.mkdir(parents=True)
    (made / "mixture.json").write_text("{}")
    (made / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:2]))
    assert "2 sequences" in (told := plan(config))
    assert "counted" in told
    (made / "train.jsonl").write_text('{"messages": []}\n')
    with pytest.raises(PromptError, match="none can be used; dspark prepare says why"):
        plan(config, "--set", "data.sources=[]")
    with pytest.raises(PromptError, match="none can be used; dspark prepare says why"):
        plan(config)


def test_the_sizes_are_those_of_what_is_loaded(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path, *ROWS))
    target = load_target(tmp_path / "target")
    loaded = sum(tensor.nbytes for tensor in target.state_dict().values())  # type: ignore[attr-defined]
    sizes = model_sizes(run, tmp_path / "target", 3, "cpu")
    assert sizes[1] == loaded
    assert sizes[3:5] == [loaded + 4 * sizes[5], 1]
    on_gpus = model_sizes(run, tmp_path / "target", 3, "cuda")
    assert on_gpus[4] == 2  # three ranks do not divide it
    assert on_gpus[3] != sizes[3]
    other = write_tiny_qwen3(tmp_path / "other")
    in_files = sum(tensor.nbytes for tensor in load_file(other / "model.safetensors").values())
    assert model_sizes(run, other, 3, "cuda")[1:5:3] == [in_files, 1]
