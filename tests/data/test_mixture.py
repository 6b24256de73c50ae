"""A mixture keeps its proportions, leaves out what it says it leaves out, and is the same whenever it is made."""

import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from dspark.data.conversations import Conversation, read_conversations
from dspark.data.mixture import HELD_OUT_FILE, REPORT_FILE, TRAIN_FILE, Mixture, load_mixture, mix
from dspark.errors import ConfigError, PromptError, RecordError

CHANCE = random.Random(0)
WORDS = [f"w{number}" for number in range(3000)]


def text() -> str:
    return " ".join(CHANCE.choices(WORDS, k=30))


def write_rows(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def mixture_of(*sources: dict[str, Any] | str, **fields: Any) -> Mixture:
    return Mixture.model_validate({"sources": sources, **fields})


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def code(tmp_path: Path) -> str:
    return write_rows(tmp_path / "code.jsonl", [{"prompt": text(), "lang": "py" if n % 2 else "c"} for n in range(300)])


@pytest.fixture
def chat(tmp_path: Path) -> str:
    return write_rows(tmp_path / "chat.jsonl", [{"prompt": text()} for _ in range(900)])


def test_every_row_is_taken_without_weights(code: str, chat: str, tmp_path: Path) -> None:
    report = mix(mixture_of({"path": code}, chat), tmp_path / "out", ())
    assert [(source.read, source.taken) for source in report.sources] == [(300, 300), (900, 900)]
    assert {(row["source"], row["index"]) for row in lines(tmp_path / "out" / TRAIN_FILE)} == {
        *((code, index) for index in range(1, 301)),
        *((chat, index) for index in range(1, 901)),
    }
    assert lines(tmp_path / "out" / HELD_OUT_FILE) == []


@pytest.mark.parametrize(("num_rows", "taken"), [(None, [300, 300]), (200, [100, 100]), (333, [166, 167])])
def test_weights_are_shares_of_the_rows(
    num_rows: int | None, taken: list[int], code: str, chat: str, tmp_path: Path
) -> None:
    """As many as the scarcest source allows, or as asked."""
    sources = ({"path": code, "weight": 2}, {"path": chat, "weight": 2})
    report = mix(mixture_of(*sources, num_rows=num_rows), tmp_path / "out", ())
    assert [source.taken for source in report.sources] == taken
    assert [source.left for source in report.sources] == [300 - taken[0], 900 - taken[1]]


def test_more_rows_than_the_weights_allow_are_refused(code: str, chat: str, tmp_path: Path) -> None:
    sources = ({"path": code, "weight": 3}, {"path": chat, "weight": 1})
    with pytest.raises(PromptError, match=r"300 of .*900 of .* give 400 rows in these proportions, 401 were asked"):
        mix(mixture_of(*sources, num_rows=401), tmp_path / "out", ())
    report = mix(mixture_of(*sources, num_rows=400), tmp_path / "out", ())
    assert [source.taken for source in report.sources] == [300, 100]


def test_any_first_part_has_the_proportions_of_all(code: str, chat: str, tmp_path: Path) -> None:
    mix(mixture_of({"path": code, "weight": 1}, {"path": chat, "weight": 3}), tmp_path / "out", ())
    rows = lines(tmp_path / "out" / TRAIN_FILE)
    assert len(rows) == 1200
    for size in (40, 100, 500):
        assert abs(sum(row["source"] == code for row in rows[:size]) - size / 4) <= 1


def test_what_is_left_out_is_counted_by_its_reason(tmp_path: Path) -> None:
    task, first, second = text(), text(), text()
    near = second.rsplit(" ", 1)[0] + " other"
    rows = [
        {"prompt": first},
        {"prompt": first.upper()},
        {"prompt": second},
        {"prompt": near},
        {"prompt": "  " + task.upper()},
        {"wrong": 1},
        {"prompt": "short"},
        {"prompt": first + second},
        {"messages": [{"role": "user", "content": text()}, {"role": "assistant", "content": "yes"}]},
        {"turns": [text(), "and then?"]},
        {"text": text()},
    ]
    source = {"path": write_rows(tmp_path / "a.jsonl", rows), "min_characters": 10, "max_characters": 300}
    apart = (Conversation("task", 1, ({"role": "user", "content": task},)),)
    report = mix(mixture_of(source), tmp_path / "out", apart)
    found = report.sources[0].model_dump(exclude={"path", "left", "held_out"})
    assert found == {
        "read": 11, "unusable": 1, "filtered": 2, "of_tasks": 1, "repeated": 1, "near": 1, "taken": 5
    }  # fmt: skip
    kept = read_conversations([str(tmp_path / "out" / TRAIN_FILE)], "train")
    assert [conversation.later_turns for conversation in kept] == [(), (), (), ("and then?",), ()]
    assert kept[2].messages[-1] == {"role": "assistant", "content": "yes"}
    assert kept[4].text == rows[10]["text"]


def test_columns_choose_rows_and_hold_the_prompt(code: str, tmp_path: Path) -> None:
    report = mix(mixture_of({"path": code, "where": {"lang": "py"}}), tmp_path / "out", ())
    assert (report.sources[0].taken, report.sources[0].filtered) == (150, 150)
    other = write_rows(tmp_path / "other.jsonl", [{"text": "no", "problem": text()}, {"text": "no"}, [1]])
    report = mix(mixture_of({"path": other, "prompt_column": "problem"}), tmp_path / "two", ())
    assert (report.sources[0].taken, report.sources[0].unusable) == (1, 2)


def test_a_line_that_is_no_json_is_a_row_without_a_prompt_and_tools_stay_with_theirs(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        json.dumps({"prompt": "How?", "tools": [{"name": "add"}]}) + '\n{"prompt": "torn\n{"prompt": "Why?"}\n'
    )
    heard: list[Any] = []
    report = mix(mixture_of(str(path)), tmp_path / "out", (), heard.append)
    assert (report.sources[0].read, report.sources[0].unusable, report.sources[0].taken) == (3, 1, 2)
    assert [isinstance(row, PromptError) for row in heard] == [False, True, False] * 2
    kept = read_conversations([str(tmp_path / "out" / TRAIN_FILE)], "train")
    assert [row.tools for row in kept] == [({"name": "add"},), ()]


def test_held_out_rows_are_no_copy_of_any_that_is_taken(code: str, tmp_path: Path) -> None:
    rows = lines(Path(code))
    doubled = write_rows(tmp_path / "doubled.jsonl", rows + rows)
    report = mix(mixture_of({"path": doubled, "held_out": 40}), tmp_path / "out", ())
    assert (report.sources[0].held_out, report.sources[0].taken, report.sources[0].repeated) == (40, 260, 300)
    held, taken = (
        {row["messages"][0]["content"] for row in lines(tmp_path / "out" / name)}
        for name in (HELD_OUT_FILE, TRAIN_FILE)
    )
    assert (len(held), len(taken), held & taken) == (40, 260, set())


def test_the_seed_alone_decides(code: str, chat: str, tmp_path: Path) -> None:
    def bytes_of(name: str, seed: int) -> bytes:
        sources = ({"path": code, "weight": 1, "held_out": 9}, {"path": chat, "weight": 1})
        mix(mixture_of(*sources, num_rows=100, seed=seed), tmp_path / name, ())
        return b"".join((tmp_path / name / file).read_bytes() for file in (TRAIN_FILE, HELD_OUT_FILE))

    assert bytes_of("a", 1) == bytes_of("b", 1) != bytes_of("c", 2)


def test_a_mixture_is_made_once(code: str, tmp_path: Path) -> None:
    mixture, folder = mixture_of({"path": code}), tmp_path / "out"
    report = mix(mixture, folder, ())
    written = (folder / TRAIN_FILE).stat().st_mtime_ns
    assert mix(mixture, folder, ()) == report
    assert (folder / TRAIN_FILE).stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match="holds another mixture"):
        mix(mixture_of({"path": code}, seed=3), folder, ())
    with pytest.raises(ConfigError, match="files have changed since"):
        mix(mixture, folder, [Conversation("task", 1, text="one more")])
    write_rows(Path(code), [{"prompt": "more"}])
    with pytest.raises(ConfigError, match="files have changed since"):
        mix(mixture, folder, ())
    write_rows(Path(code), lines(folder / TRAIN_FILE))
    (tmp_path / "other").mkdir()
    report = mix(mixture, tmp_path / "other", ())
    (tmp_path / "other" / TRAIN_FILE).unlink()
    with pytest.raises(ConfigError, match="delete it and the responses made from it"):
        mix(mixture, tmp_path / "other", ())
    (folder / REPORT_FILE).write_text("{}")
    with pytest.raises(RecordError, match=r"mixture.json: .* delete its folder"):
        mix(mixture, folder, ())


def test_nothing_is_left_behind_and_a_killed_one_begins_anew(code: str, tmp_path: Path) -> None:
    (tmp_path / "mixture.yaml").write_text(yaml.safe_dump({"sources": [{"path": code}]}))
    program = f"""
from pathlib import Path
from dspark.data.mixture import load_mixture, mix
import time
place = Path({str(tmp_path)!r})
mix(load_mixture(place / "mixture.yaml"), place / "out", (), lambda _: time.sleep(0.001))
"""
    for seconds in (0.05, 0.3, 0.5):
        process = subprocess.Popen([sys.executable, "-c", program])
        while not list(tmp_path.glob("out/.fingerprints")) and process.poll() is None:
            time.sleep(0.01)
        time.sleep(seconds)
        process.kill()
        process.wait()
    mix(load_mixture(tmp_path / "mixture.yaml"), tmp_path / "out", ())
    mix(load_mixture(tmp_path / "mixture.yaml"), tmp_path / "undisturbed", ())
    assert (tmp_path / "out" / TRAIN_FILE).read_bytes() == (tmp_path / "undisturbed" / TRAIN_FILE).read_bytes()
    names = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert names == sorted([TRAIN_FILE, HELD_OUT_FILE, REPORT_FILE])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("sources: []", "there must be one at least"),
        ("sources: [{path: a, weight: 0}]", "weight"),
        ("sources: [{path: a, weight: 1}, {path: b}]", "either every source has a weight or none"),
        ("sources: [{path: a, wieght: 1}]", "sources.0.wieght is not a known key; remove it or mend its spelling$"),
        ("sources: [{path: a}]\nnear_similarity: 1.5", "near_similarity"),
        ("sources: {path", "not valid YAML"),
        ("sources: [{path: a, path: b}]", "path"),
        ("[1]", "mixture.yaml"),
    ],
)
def test_a_wrong_description_is_one_line(content: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mixture.yaml").write_text(content)
    with pytest.raises(ConfigError, match=message) as raised:
        load_mixture(tmp_path / "mixture.yaml")
    assert "\n" not in str(raised.value)


def test_nothing_left_and_no_source_are_errors(code: str, tmp_path: Path) -> None:
    with pytest.raises(PromptError, match=r"no row is left: .*code.jsonl: 300 read, 300 filtered out"):
        mix(mixture_of({"path": code, "min_characters": 10**6}), tmp_path / "out", ())
    with pytest.raises(PromptError, match="no such file"):
        mix(mixture_of({"path": str(tmp_path / "none.jsonl")}), tmp_path / "out", ())


def test_a_million_rows_take_less_than_a_gigabyte(tmp_path: Path) -> None:
    program = f"""
from pathlib import Path
from dspark.data.mixture import Mixture, mix
place = Path({str(tmp_path)!r})
with open(place / "rows.jsonl", "w") as file:
    row = '{{"prompt": "%d %d what is the sum of these"}}\\n'
    file.writelines(row % (n, n * 7919 % 999983) for n in range(1_000_000))
mixture = Mixture.model_validate({{"sources": [{{"path": str(place / "rows.jsonl"), "held_out": 1000}}]}})
report = mix(mixture, place / "out", ())
peak = Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]  # getrusage would tell the parent's
print(report.sources[0].read, int(peak) // 1024)
"""
    done = subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, check=True)
    num_read, megabytes = map(int, done.stdout.split())
    assert num_read == 1_000_000
    assert megabytes < 1000
