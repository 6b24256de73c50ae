"""Prompts lie on disk: they come back as they were, are made once, and a million of them take little memory."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from recorded import digest

from dspark.data.conversations import Conversation
from dspark.data.rows import ASKED_FILE, Prompt, Prompts, open_prompts
from dspark.errors import PromptError, RecordError

TOOLS = ({"type": "function"},)
TALK = Conversation("é.jsonl", 3, ({"role": "user", "content": "ü\n"},), tools=TOOLS)
ROWS = [
    [Prompt.of(TALK, [1, 2], temperature=0.5), Prompt.of(TALK, [1, 2, 3], temperature=1.0, is_thinking=True)],
    [Prompt.of(Conversation("t.jsonl", 1, text="a b"), [7])],
]


def test_prompts_come_back_as_they_were_from_any_thread(tmp_path: Path) -> None:
    prompts = open_prompts(tmp_path / ASKED_FILE, ROWS, Prompt, None)
    rows = [row for several in ROWS for row in several]
    assert list(prompts) == prompts[:] == rows
    assert (prompts[-1], prompts[1:]) == (rows[2], rows[1:])
    with pytest.raises(IndexError):
        prompts[3]
    assert [row.conversation for row in prompts] == [TALK, TALK, Conversation("t.jsonl", 1, text="a b")]
    assert prompts.num_tokens_S.tolist() == [2, 3, 1]
    assert prompts.temperatures_S.tolist()[:2] == [0.5, 1.0]
    assert prompts.sha256 == digest(torch.tensor(row.prompt_ids) for row in rows)
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda number: prompts[number % 3] == rows[number % 3], range(600))) == [True] * 600


def test_they_are_made_once_if_they_are_those_that_are_known(tmp_path: Path) -> None:
    path = tmp_path / ASKED_FILE
    known = open_prompts(path, ROWS, Prompt, None).sha256
    written = path.stat().st_mtime_ns

    def never() -> Iterator[list[Prompt]]:
        raise AssertionError
        yield

    assert len(open_prompts(path, never(), Prompt, known)) == 3
    assert path.stat().st_mtime_ns == written
    assert open_prompts(path, ROWS[1:], Prompt, "0" * 64).sha256 != known
    assert len(open_prompts(path, ROWS, Prompt, known)) == 3


def test_nothing_is_left_of_prompts_that_are_refused(tmp_path: Path) -> None:
    def rows() -> Iterator[list[Prompt]]:
        yield ROWS[0]
        raise PromptError("no")

    with pytest.raises(PromptError):
        open_prompts(tmp_path / ASKED_FILE, rows(), Prompt, None)
    assert not list(tmp_path.iterdir())
    (tmp_path / ASKED_FILE).write_text(ROWS[1][0].model_dump_json() + "\n{}\n")
    with pytest.raises(RecordError, match=r"asked.jsonl:2: not a response \(source is missing"):
        Prompts(tmp_path / ASKED_FILE, Prompt)


PROGRAM = """
import sys
from collections import Counter
from pathlib import Path
import torch
from test_responses import HEADER
from dspark.data.conversations import encode_each, parse_conversation, stream_rows
from dspark.data.rows import ASKED_FILE, Prompt, open_prompts
from dspark.data.responses import in_batches, open_responses, write_responses

def megabytes():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) // 1024

def encode(row):
    talk = parse_conversation(*row)
    return [Prompt.of(talk, [5, talk.index % 7, talk.index], temperature=each) for each in (0.2, 0.5, 0.7, 1.0)]

class Words:
    added_tokens_decoder = {}
    decode = lambda self, ids: "yes"

place, number = Path(sys.argv[1]), 250_000
path = place / "responses.jsonl"
with open(place / "rows.jsonl", "w") as file:
    file.writelines(f'{{"prompt": "{n} and what is the sum of these"}}\\n' for n in range(number))
start = megabytes()
raw = stream_rows([str(place / "rows.jsonl")], "train")
prompts = open_prompts(place / ASKED_FILE, encode_each(raw, encode, Counter()), Prompt, None)
header = HEADER.model_copy(update={"prompts_sha256": prompts.sha256, "num_prompts": 4 * number})
answers = [torch.tensor([7, 8, 302])]
ask = in_batches(lambda asked, rows: answers * len(rows), prompts, 4096)
kinds = write_responses(ask, Words(), prompts, header, path, lambda *_: None)
answered = megabytes()
responses = open_responses(path, header, max_tokens=99, vocab_size=2**20)
assert responses[-1].ids_T.tolist() == [5, number % 7, number, 7, 8, 302]
print(kinds["stop"], len(responses), answered, megabytes() - start)
"""


@pytest.mark.timeout(900)
def test_a_million_prompts_take_less_than_a_gigabyte_and_their_responses_300_megabytes(tmp_path: Path) -> None:
    """From the sources to what is recorded: 250,000 conversations at four temperatures each. One to two minutes."""
    folders = [Path(__file__).parents[depth] for depth in range(3)]
    paths = f"import sys; sys.path += {[str(folder) for folder in folders]}"
    command = [sys.executable, "-c", paths + PROGRAM, str(tmp_path)]
    done = subprocess.run(command, text=True, capture_output=True, check=True)
    num_stopped, num_recorded, answered, grown = map(int, done.stdout.split())
    assert num_stopped == num_recorded == 1_000_000
    assert answered < 1000
    assert grown < 300
