"""dspark prepare with endpoints: killed at any moment it goes on to the same bytes; the key stays where it was."""

import json
import multiprocessing
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from prompts_run import write_prompts_run
from serving import Served, completion, refuse, serving

from dspark.cli.main import main
from dspark.cli.prepare import prepare
from dspark.cli.record import record
from dspark.data.responses import read_header
from dspark.errors import ConfigError, PromptError, RecordError

NUM_ROWS = 120
ROWS: list[dict[str, Any]] = [{"prompt": f"Add {row} and {row % 7}."} for row in range(NUM_ROWS)]
KEY = "sk-secret"


def served(folder: Path, url: str) -> list[str]:
    """What a run into this folder sets to be answered at this address."""
    return [f"data.endpoints=[{url}]", "data.served_model=tiny", "data.concurrency=5", f"record.folder={folder}"]


def test_a_run_killed_again_and_again_ends_with_the_same_bytes_and_asks_for_no_row_that_was_kept(
    tmp_path: Path,
) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dspark.cli.prepare"])
    config, path, draw = write_prompts_run(tmp_path, *ROWS), tmp_path / "record" / "responses.jsonl", random.Random(0)
    with serving(Served()) as server:
        prepare(config, served(tmp_path / "calm", server.url))
        asked_in_all = {tuple(body["prompt"]) for body in server.bodies}
        server.seconds = 0.02
        kept: set[tuple[int, ...]] = set()
        for prompts_file in (".asked.jsonl.partial", "asked.jsonl"):
            child = context.Process(target=prepare, args=(config, served(path.parent, server.url)))
            child.start()
            while not (path.parent / prompts_file).exists() and child.is_alive():
                time.sleep(0.0005)
            child.kill()
            child.join()
            assert not path.exists()
        path.with_suffix(".journal").unlink(missing_ok=True)
        for _ in range(4):
            server.bodies = []
            child = context.Process(target=prepare, args=(config, served(path.parent, server.url)))
            child.start()
            num_asked = draw.randrange(1, 14)
            while len(server.bodies) < num_asked and child.is_alive():
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 0.03))
            child.kill()
            child.join()
            time.sleep(0.05)  # for what it had sent
            assert not kept & {tuple(body["prompt"]) for body in server.bodies}
            lines = path.with_suffix(".journal").read_bytes().splitlines(keepends=True)
            rows = [json.loads(line.partition(b" ")[2]) for line in lines if line.endswith(b"\n")]
            num_before, kept = len(kept), {tuple(row["prompt_ids"]) for row in rows}
            assert len(rows) == len(kept) >= num_before + len(server.bodies) - 5
            assert not path.exists()
        server.bodies, server.seconds = [], 0.0
        prepare(config, served(path.parent, server.url))
    assert len(kept) > 4
    assert {tuple(body["prompt"]) for body in server.bodies} == asked_in_all - kept
    assert path.read_bytes() == (tmp_path / "calm" / "responses.jsonl").read_bytes()
    assert sorted(file.name for file in path.parent.iterdir()) == ["responses.header.json", "responses.jsonl"]


def test_the_command_prints_what_was_not_exact_and_record_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = write_prompts_run(tmp_path, *ROWS[:6]), tmp_path / "record"
    monkeypatch.setenv("DSPARK_API_KEY", KEY)

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        if body["seed"] % 2:
            return completion(body)
        return {"choices": [{"text": "four", "finish_reason": "stop"}]}

    with serving(Served(answer)) as server:
        overrides = [*served(folder, server.url), "data.concurrency=1"]
        options = [part for each in overrides for part in ("--set", each)]
        monkeypatch.setattr(sys, "argv", ["dspark", "prepare", "--config", str(config), *options])
        server.faults = [refuse(401, f"no such key: {KEY}".encode())]
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        refused = capsys.readouterr()
        server.faults = [refuse(500)]
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 0
        with pytest.raises(RecordError, match=r"served_as 'completions of tiny' \(now 'completions of big'\)"):
            prepare(config, [*served(folder, server.url), "data.served_model=big"])
        with pytest.raises(RecordError, match=r"generation_batch_size 1 \(now 2\).*served_as 'completions of tiny'"):
            prepare(config)
    assert refused.err.count("\n") == 1
    assert f"{server.url}: HTTP 401 Unauthorized: no such key: ***" in refused.err
    out = capsys.readouterr().out
    assert KEY not in out + refused.err + "".join(file.read_text() for file in folder.iterdir())
    rows = [json.loads(line) for line in (folder / "responses.jsonl").read_text().splitlines()]
    num_text = sum(row.get("is_retokenised", False) for row in rows)
    assert 0 < num_text < 6
    assert f"6 responses in {folder}/responses.jsonl: " in out
    assert f", 0 failed, {num_text} retokenised; failed tries: 1, the last" in out
    assert f"failed tries: 1, the last at {server.url}: HTTP 500 Internal Server Error: " in out
    assert {header["Authorization"] for header in server.headers} == {f"Bearer {KEY}"}
    assert read_header(folder / "responses.jsonl").served_as == "completions of tiny"
    record(config, device="cpu")


def test_what_cannot_work_is_refused_before_anything_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, options = write_prompts_run(tmp_path, {"text": "def add(a, b):"}), served(tmp_path / "record", "http://x")
    with pytest.raises(PromptError, match=r"plain text; data.endpoint_route chat.completions needs messages"):
        prepare(config, [*options, "data.endpoint_route=chat/completions"])
    with pytest.raises(ConfigError, match="data: thinking needs endpoint_route completions"):
        prepare(config, [*options, "data.endpoint_route=chat/completions", "data.thinking=[true]"])
    with pytest.raises(ConfigError, match="data: served_model is missing"):
        prepare(config, [*options, 'data.served_model=""'])
    hosts = ("x", "ftp://x", "http://", "http://user:word@x", "http://x/v1?key=word", "http://x/\x1b", "http://[word")
    for url in (*hosts, "http://x:65536", "http://x:word", "http://é/v1"):
        with pytest.raises(ConfigError, match=r"data.endpoints.0: must be like http://host:port/v1") as error:
            prepare(config, [*options, f"data.endpoints={json.dumps([url])}"])
        assert "word" not in str(error.value)
    monkeypatch.setenv("DSPARK_API_KEY", KEY + "\n")
    with pytest.raises(ConfigError, match="DSPARK_API_KEY: holds a space") as error:
        prepare(config, options)
    assert KEY not in str(error.value)
    assert not list((tmp_path / "record").iterdir())
