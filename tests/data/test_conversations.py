"""Rows become conversations in order, and a wrong row is named with its line."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import datasets.load
import pytest
from datasets import Dataset

from dspark.data.conversations import Conversation, count_rows, encode_each, read_conversations
from dspark.errors import PromptError

QUESTION = {"role": "user", "content": "Who are you?"}
ANSWER = {"role": "assistant", "content": "A model."}


def write_rows(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_every_kind_of_row_becomes_the_same_conversation(tmp_path: Path) -> None:
    source = write_rows(
        tmp_path / "rows.jsonl",
        {"messages": [QUESTION, ANSWER], "prompt": "ignored"},
        {"conversations": [{"from": "human", "value": "Who are you?"}, {"from": "gpt", "value": "A model."}]},
        {"prompt": "Who are you?"},
        {"text": "def add(a, b):", "prompt": None},
    )
    chat, sharegpt, prompt, text = read_conversations([source], "train")
    assert chat.messages == sharegpt.messages == (QUESTION, ANSWER)
    assert prompt == Conversation(source, 3, (QUESTION,))
    assert text == Conversation(source, 4, text="def add(a, b):")


def test_parquet_rows_read_like_jsonl_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.parquet"
    Dataset.from_list([{"messages": [QUESTION, ANSWER]}, {"messages": [QUESTION]}]).to_parquet(path)
    found = read_conversations([str(path)], "train")
    assert [row.messages for row in found] == [(QUESTION, ANSWER), (QUESTION,)]
    assert [row.place for row in found] == [f"{path}:1", f"{path}:2"]
    assert count_rows(str(path), "train") == 2


def test_the_limit_counts_over_all_sources_and_blank_lines_keep_their_number(tmp_path: Path) -> None:
    first = tmp_path / "first.jsonl"
    first.write_text('{"prompt": "a"}\n\n{"prompt": "b"}\n')
    second = write_rows(tmp_path / "second.jsonl", {"prompt": "c"}, {"prompt": "d"})
    found = read_conversations([str(first), second], "train", limit=3)
    assert [row.place for row in found] == [f"{first}:1", f"{first}:3", f"{second}:1"]
    assert count_rows(str(first), "train") == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": ', ["not valid JSON", "'messages', 'prompt', 'turns' or 'text'"]),
        ("[1]", ["found list"]),
        ('{"question": "a"}', ["found the keys ['question']"]),
        ('{"prompt": 3}', ["prompt is int", "expected text"]),
        ('{"messages": "a"}', ["messages is str", "expected a list"]),
        ('{"messages": [{"role": "user"}]}', ["message 1 is {'role': 'user'}", "both text"]),
        ('{"messages": [{"role": "user", "content": ["a"]}]}', ["message 1", "both text"]),
    ],
)
def test_a_wrong_row_is_named_with_file_and_line(tmp_path: Path, line: str, words: list[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(PromptError) as error:
        read_conversations([str(path)], "train")
    for word in [f"{path}:2: ", *words]:
        assert word in str(error.value)


@pytest.mark.parametrize("half", ["\\ud83d", "a\\uDE00b"])
def test_half_a_surrogate_pair_is_called_what_it_is(tmp_path: Path, half: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "\\ud83d\\ude00"}\n{"prompt": "' + half + '"}\n')
    with pytest.raises(PromptError, match=r"rows.jsonl:2: holds half a surrogate pair, '.ud(83d|e00)', .*mend it$"):
        read_conversations([str(path)], "train")


def test_a_mistyped_name_of_a_hub_data_set_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, split: str) -> None:
        raise FileNotFoundError(f"no {name}\n  on\n the Hub")

    monkeypatch.setattr(datasets.load, "load_dataset", load)
    with pytest.raises(
        PromptError, match=r"^org/nmae: found no .*\(no org/nmae on the Hub\); check data.sources"
    ) as error:
        read_conversations(["org/nmae"], "train")
    assert "\n" not in str(error.value)


def test_rows_of_a_hub_data_set_read_like_those_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = [{"from": "human", "value": "hello"}, {"from": "gpt", "value": "yes"}]
    held = {("org/name", "validation"): [{"conversations": turns}, {"prompt": "two"}]}
    monkeypatch.setattr(datasets.load, "load_dataset", lambda name, split: held[name, split])
    one, two = read_conversations(["org/name"], "validation")
    assert [message["role"] for message in one.messages] == ["user", "assistant"]
    assert two.place == "org/name:2"
    assert count_rows("org/name", "validation") == 2


def test_a_missing_or_damaged_or_empty_source_is_named(tmp_path: Path) -> None:
    damaged, empty = tmp_path / "damaged.parquet", tmp_path / "empty.jsonl"
    damaged.write_bytes(b"PAR1 but not really")
    empty.write_text("\n")
    wrong = {str(tmp_path / "absent.jsonl"): "no such file", str(damaged): "not a readable parquet file"}
    wrong |= {str(empty): "found no conversation", str(tmp_path / "nowhere"): "no hub data set"}
    for source, words in wrong.items():
        with pytest.raises(PromptError, match=words) as error:
            read_conversations([source], "train")
        assert source in str(error.value)


def test_unusable_conversations_are_refused_together_before_anything_starts() -> None:
    conversations = [Conversation("a.jsonl", index) for index in range(1, 7)]

    def encode(conversation: Conversation) -> int:
        if conversation.index != 3:
            raise PromptError(f"{conversation.place}: wrong")
        return conversation.index

    counts = Counter[str]()
    with pytest.raises(PromptError) as error:
        list(encode_each(conversations, encode, counts))
    message = str(error.value)
    assert "5 of 6 conversations cannot be used" in message
    assert all(f"a.jsonl:{index}: wrong" in message for index in (1, 2, 4))
    assert "and 2 more" in message
    assert "--leave-out-unusable" in message
    assert counts == {"rows": 6, "left out": 5}
    assert list(encode_each(iter(conversations), encode, Counter(), is_leaving_out=True)) == [3]
    with pytest.raises(PromptError, match="2 of 2"):
        list(encode_each(conversations[:2], encode, Counter(), is_leaving_out=True))
