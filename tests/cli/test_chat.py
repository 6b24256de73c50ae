"""dspark chat: the target's own words, who wrote them, and what was said before."""

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from evaluating import failure, write_tiny_draft
from rich.console import Console
from tiny import write_tiny_ling
from typer.testing import CliRunner

from dspark.cli import chat as door
from dspark.cli.main import app
from dspark.data.chat import ChatFormat, encode_prompt
from dspark.data.conversations import Conversation
from dspark.decode.generation import generate
from dspark.decode.round import Round
from dspark.decode.sampling import Sampling, row_uniforms
from dspark.decode.speaking import Spoken
from dspark.target.loading import load_target, target_facts
from dspark.target.tokenizer import load_tokenizer

ROOT = Path(__file__).parent.parent.parent
FIGURES = re.compile(r"(\d+) tokens, [\d.]+ a second(?:; ([\d.]+) a round, (\d+) rounds)?")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat")
    write_tiny_ling(folder / "target")
    write_tiny_draft(folder / "draft", folder / "target")
    return folder


def words(place: Path, **changes: str) -> list[str]:
    given = {"target": str(place / "target"), "draft": str(place / "draft"), "max-new-tokens": "12"} | changes
    return ["chat", *(part for key, value in given.items() for part in (f"--{key}", value))]


def test_the_talk_is_the_targets_own_and_remembers_what_was_said(place: Path) -> None:
    result = CliRunner().invoke(app, words(place), input="add\n\nmore\n", catch_exceptions=False)
    assert result.exit_code == 0
    form = ChatFormat(load_tokenizer(place / "target"), target_facts(place / "target").stop_token_ids)
    target = load_target(place / "target", target_layer_ids=(), dtype=torch.float32)
    messages, answers = [], []
    for line in ("add", "more"):
        messages.append({"role": "user", "content": line})
        prompt_ids_T = encode_prompt(form, Conversation("chat", 1, tuple(messages)))
        sampling = Sampling(0.0, 12, tuple(form.stop_token_ids))
        (ids_T,) = generate(target, [prompt_ids_T], sampling, [row_uniforms(0, 0)])
        answers.append(str(form.tokenizer.decode(ids_T.tolist(), skip_special_tokens=True)))
        messages.append({"role": "assistant", "content": answers[-1]})
    said = result.stdout
    for answer in answers:
        assert answer in said
        said = said[said.index(answer) + len(answer) :]
    assert len(FIGURES.findall(result.stdout)) == 2  # the empty line said nothing


def spoken(*rounds: tuple[list[int], int]) -> Iterator[list[Spoken]]:
    yield [Spoken(0, [ord("a")], None)]
    for ids, accepted in rounds:
        yield [Spoken(0, ids, Round(4, accepted, accepted + 1, False, ()))]


class Letters:
    """A tokenizer of characters; 0 and 1 are the two bytes of one."""

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return b"".join({0: b"\xc3", 1: b"\xa9"}.get(each, bytes([each])) for each in ids).decode(errors="replace")


def test_what_was_drafted_is_green_and_lines_and_characters_are_whole() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=80, highlight=False)
    form = ChatFormat(Letters(), ())  # type: ignore[arg-type]
    ids = [[ord(c) for c in "bcd"], [0, 1, ord("\n")], [ord("e")]]
    text = door.show(console, form, spoken((ids[0], 2), (ids[1], 2), (ids[2], 0)))
    assert text == "abcdé\ne"
    shown = file.getvalue()
    assert "a\x1b[32mb\x1b[0m\x1b[32mc\x1b[0md\x1b[32mé\x1b[0m\n" in shown
    tokens, length, rounds = FIGURES.findall(shown)[-1]
    assert (tokens, length, rounds) == ("8", "2.33", "3")


def test_ctrl_c_ends_the_answer_and_not_the_talk(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[list[dict[str, str]]] = []

    def interrupted(*_: object) -> Iterator[list[Spoken]]:
        yield [Spoken(0, [65], None)]
        raise KeyboardInterrupt

    def heard(form: ChatFormat, conversation: Conversation) -> torch.Tensor:
        turns.append(list(conversation.messages))
        return encode_prompt(form, conversation)

    monkeypatch.setattr(door, "DraftSpeaker", lambda *_: interrupted)
    monkeypatch.setattr(door, "encode_prompt", heard)
    result = CliRunner().invoke(app, words(place), input="one\ntwo\n", catch_exceptions=False)
    assert result.exit_code == 0
    first = str(load_tokenizer(place / "target").decode([65], skip_special_tokens=True))
    assert [message["content"] for message in turns[1]] == ["one", first, "two"]


def test_a_talk_longer_than_the_drafts_positions_forgets_its_first_turns_and_says_so(place: Path) -> None:
    long, longer = "word " * 60, "word " * 400
    result = CliRunner().invoke(app, words(place), input=f"{long}\n{long}\n{longer}\nadd\n", catch_exceptions=False)
    assert result.exit_code == 0
    said = result.stdout.replace("\n", " ")
    assert "room for 500: the first turn is forgotten" in said
    assert "room for 500: this line is too long and forgotten" in said
    assert len(FIGURES.findall(result.stdout)) == 3


def test_bytes_that_are_no_text_do_not_end_the_talk(place: Path) -> None:
    command = [sys.executable, "-m", "dspark.cli.main", *words(place)]
    done = subprocess.run(command, cwd=ROOT, input=b"\xff\xfe bad\nadd\n", capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(FIGURES.findall(done.stdout.decode())) == 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"target": "nowhere"}, "nowhere: no folder with a config.json"),
        ({"draft": "nowhere"}, "nowhere/config.json: no such file"),
        ({"top-p": "2"}, "top_p: Input should be less than or equal to 1, got 2.0"),
        ({"dtype": "int8"}, "dtype: Input should be 'bfloat16', 'float32' or 'float64', got 'int8'"),
    ],
    ids=str,
)
def test_a_mistake_is_one_clear_line(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, str],
    complaint: str,
) -> None:
    assert complaint in failure(monkeypatch, capsys, words(place, **changes))
