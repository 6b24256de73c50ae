"""What was decoded comes back exactly, whenever its writer was killed, and only to the same evaluation."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pyarrow import parquet
from rounds_file import read_rounds

from dspark.decode.round import Round
from dspark.errors import ConfigError, RecordError
from dspark.eval.records import JOURNAL_FILE, Journal, TextKey, open_journal, write_rounds
from dspark.eval.timing import DecodedText

SETTINGS = {"seed": 7, "draft": {"fingerprint": "a" * 8}, "temperatures": (0.0, 1.0)}


def make_text(index: int, num_rounds: int = 3) -> DecodedText:
    generator = torch.Generator().manual_seed(index)
    logits = torch.randn(num_rounds, 4, generator=generator).tolist()
    rounds = tuple(
        Round(4, slot % 5, slot % 5 + 1, slot == num_rounds - 1, tuple(row)) for slot, row in enumerate(logits)
    )
    ids_T = torch.randint(0, 157184, (9,), generator=generator)
    return DecodedText(
        ids_T, rounds, 0.1 + index / 3, index % 2 == 1, 0.01 * index, {"prefill": index / 3, "other": 0.1}
    )


def key(index: int, contender: str = "draft", temperature: float = 0.7) -> TextKey:
    return TextKey("heldout", temperature, contender, index)


TEXTS = {key(index): make_text(index) for index in range(4)} | {key(0, "plain", 0.0): make_text(0, num_rounds=0)}


def assert_same(found: dict[TextKey, DecodedText], expected: dict[TextKey, DecodedText]) -> None:
    assert list(found) == list(expected)
    for name, text in expected.items():
        assert found[name].ids_T.dtype == torch.int64
        assert found[name].ids_T.tolist() == text.ids_T.tolist()
        assert replace(found[name], ids_T=text.ids_T) == text, "bit for bit, seconds and logits included"


def write(folder: Path, texts: dict[TextKey, DecodedText] = TEXTS) -> None:
    with open_journal(folder, SETTINGS) as journal:
        for name, text in texts.items():
            journal.append(name, text)


def read(folder: Path) -> dict[TextKey, DecodedText]:
    with open_journal(folder, SETTINGS) as journal:
        return dict(journal.texts)


def test_rounds_come_back_from_parquet_as_they_were(tmp_path: Path) -> None:
    write_rounds(TEXTS, tmp_path / "rounds.parquet")
    assert read_rounds(tmp_path / "rounds.parquet") == {
        name: text.rounds for name, text in TEXTS.items() if text.rounds
    }
    assert [path.name for path in tmp_path.iterdir()] == ["rounds.parquet"]


def test_rounds_without_confidence_and_no_rounds_at_all_come_back(tmp_path: Path) -> None:
    bare = replace(make_text(1), rounds=(Round(0, 0, 1, True, ()), Round(3, 2, 3, False, (math.inf, 0.1))))
    write_rounds({key(5): bare}, tmp_path / "rounds.parquet")
    assert read_rounds(tmp_path / "rounds.parquet") == {key(5): bare.rounds}
    write_rounds({}, tmp_path / "rounds.parquet")
    assert read_rounds(tmp_path / "rounds.parquet") == {}


def test_any_reader_of_parquet_finds_a_row_a_round(tmp_path: Path) -> None:
    write_rounds(TEXTS, tmp_path / "rounds.parquet")
    table = parquet.read_table(tmp_path / "rounds.parquet")
    assert table.num_rows == 12
    row = table.to_pylist()[5]
    assert (row["task"], row["temperature"], row["contender"]) == ("heldout", 0.7, "draft")
    assert (row["prompt_index"], row["round_index"], row["acceptance_length"], row["is_cut"]) == (1, 2, 3, True)


def test_a_journal_gives_back_every_text_and_goes_on(tmp_path: Path) -> None:
    write(tmp_path)
    assert_same(read(tmp_path), TEXTS)
    write(tmp_path, {key(9): make_text(9)})
    assert_same(read(tmp_path), TEXTS | {key(9): make_text(9)})


def test_logits_that_are_not_finite_come_back(tmp_path: Path) -> None:
    text = replace(make_text(1), rounds=(Round(2, 0, 1, False, (math.inf, -math.inf)),))
    write(tmp_path, {key(1): text})
    assert_same(read(tmp_path), {key(1): text})


def test_a_last_line_torn_anywhere_is_dropped_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / JOURNAL_FILE
    whole = path.read_bytes()
    start = whole[:-1].rfind(b"\n") + 1
    kept = dict(list(TEXTS.items())[:-1])
    for cut in range(start, len(whole)):
        path.write_bytes(whole[:cut])
        assert_same(read(tmp_path), kept)
        assert path.read_bytes() == whole[:start]
    write(tmp_path, dict(list(TEXTS.items())[-1:]))
    assert path.read_bytes() == whole


CHILD = """
import sys
from pathlib import Path
from test_records import SETTINGS, key, make_text, open_journal
with open_journal(Path(sys.argv[1]), SETTINGS) as journal:
    for index in range(10**9):
        if key(index) not in journal.texts:
            journal.append(key(index), make_text(index))
            print(index, flush=True)
"""


def test_a_writer_that_is_killed_loses_nothing_it_called_done(tmp_path: Path) -> None:
    search = os.pathsep.join(map(str, [Path(__file__).parent, *Path(__file__).parents[1:3]]))
    num_done = 0
    for _ in range(2):
        child = subprocess.Popen(
            [sys.executable, "-c", CHILD, str(tmp_path)],
            env=os.environ | {"PYTHONPATH": search},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        said = [int(child.stdout.readline()) for _ in range(20)]
        child.send_signal(signal.SIGKILL)
        said += [int(line) for line in child.stdout.read().splitlines()]
        child.wait()
        child.stdout.close()
        assert said == list(range(num_done, num_done + len(said)))
        texts = read(tmp_path)
        num_done = len(texts)
        assert num_done - said[-1] in {1, 2}, "one more may be on the disk than was said"
        assert_same(texts, {key(index): make_text(index) for index in range(num_done)})


def test_every_text_is_on_the_disk_when_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        real(handle)
        synced.append((tmp_path / JOURNAL_FILE).stat().st_size)

    with open_journal(tmp_path, SETTINGS) as journal:
        monkeypatch.setattr(os, "fsync", fsync)
        for index in range(3):
            journal.append(key(index), make_text(index))
            assert len(synced) == index + 1
            assert synced[-1] == (tmp_path / JOURNAL_FILE).stat().st_size
    assert len(set(synced)) == 3


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (SETTINGS | {"seed": 8}, r"made with seed 7 \(now 8\); choose"),
        (SETTINGS | {"draft": {"fingerprint": "b"}}, r"made with draft.fingerprint 'aaaaaaaa' \(now 'b'\); choose"),
        (SETTINGS | {"dtype": "float32"}, r"made with dtype 'absent' \(now 'float32'\); choose"),
        ({"seed": 7, "draft": {"fingerprint": "a" * 8}}, r"made with temperatures \[0.0, 1.0\] \(now 'absent'\)"),
        (
            SETTINGS | {"draft": {}, "seed": 1},
            r"made with seed .*, draft.fingerprint 'aaaaaaaa' \(now 'absent'\), draft",
        ),
    ],
    ids=str,
)
def test_a_journal_of_another_run_is_refused_and_left_as_it_is(
    tmp_path: Path, settings: dict[str, object], named: str
) -> None:
    write(tmp_path)
    (tmp_path / JOURNAL_FILE).open("ab").write(b'{"torn')
    before = (tmp_path / JOURNAL_FILE).read_bytes()
    with pytest.raises(RecordError, match=named), open_journal(tmp_path, settings):
        pass
    assert (tmp_path / JOURNAL_FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("line", "named"),
    [
        (b"nothing", r"texts.jsonl:4: not a text"),
        (b'{"task": "heldout"}', r"texts.jsonl:4: not a text \(temperature is missing"),
        (b"", r"texts.jsonl:4: not a text"),
        (None, r"texts.jsonl:4: TextKey.*twice"),
    ],
    ids=str,
)
def test_a_whole_line_that_is_no_text_is_named(tmp_path: Path, line: bytes | None, named: str) -> None:
    write(tmp_path)
    lines = (tmp_path / JOURNAL_FILE).read_bytes().split(b"\n")
    lines[3] = lines[1] if line is None else line
    (tmp_path / JOURNAL_FILE).write_bytes(b"\n".join(lines))
    with pytest.raises(RecordError, match=named):
        read(tmp_path)


def test_ids_no_tensor_could_hold_are_refused(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / JOURNAL_FILE
    header, first, *_ = path.read_text().splitlines()
    for ids in ([2**70], [-1], [1.5], [True]):
        path.write_text(f"{header}\n{json.dumps(json.loads(first) | {'ids': ids})}\n")
        with pytest.raises(RecordError, match=r"texts.jsonl:2: not a text \(ids.0"):
            read(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{}\n", b'{"format": "dspark-te', b'{"format": "other", "settings": {}}\n'])
def test_a_file_that_is_no_journal_is_refused_and_left_as_it_is(tmp_path: Path, content: bytes) -> None:
    (tmp_path / JOURNAL_FILE).write_bytes(content)
    with pytest.raises(RecordError, match=r"not a journal|found the format 'other'"):
        read(tmp_path)
    assert (tmp_path / JOURNAL_FILE).read_bytes() == content


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    with (
        open_journal(tmp_path, SETTINGS),
        pytest.raises(ConfigError, match="another process writes here"),
        open_journal(tmp_path, SETTINGS),
    ):
        pass


def test_a_text_is_appended_once(tmp_path: Path) -> None:
    with open_journal(tmp_path, SETTINGS) as journal:
        assert isinstance(journal, Journal)
        journal.append(key(0), make_text(0))
        with pytest.raises(AssertionError, match="is done"):
            journal.append(key(0), make_text(0))
