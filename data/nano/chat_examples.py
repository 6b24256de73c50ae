"""Prompts with answers found in the corpus: the answer is always text that somebody wrote, word for word."""

import ast
import inspect
import random
import re
import textwrap
from collections.abc import Iterator
from typing import NamedTuple

MAX_PROMPT_CHARS = 650
MAX_ANSWER_CHARS = 1400
MIN_ANSWER_CHARS = 40

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Example(NamedTuple):
    """One exchange; ``source`` is package/path::name."""

    kind: str
    prompt: str
    answer: str
    source: str


def code_block(code: str) -> str:
    """Fence Python code."""
    return f"```python\n{code}\n```"


def lines_of(lines: list[str], first: int, last: int) -> str:
    """Lines first..last (from 1, both included), dedented."""
    return textwrap.dedent("\n".join(lines[first - 1 : last])).strip("\n")


def docstring_of(node: Function | ast.ClassDef) -> tuple[ast.Expr, str] | None:
    """The docstring's statement and its cleaned text."""
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        text = inspect.cleandoc(first.value.value)
        return (first, text) if len(text) >= 15 else None
    return None


def summary(text: str) -> str:
    """The first paragraph on one line."""
    return " ".join(text.split("\n\n")[0].split())


def function_examples(node: Function, lines: list[str], rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """(kind, prompt, answer) that one documented function allows, in random order."""
    documented = docstring_of(node)
    if documented is None or len(node.body) < 2 or node.end_lineno is None:
        return
    statement, doc = documented
    start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    whole = lines_of(lines, start, node.end_lineno)
    head = lines_of(lines, start, statement.end_lineno or node.lineno)
    body = whole[len(head) :].strip("\n")
    bare = lines_of(lines, start, statement.lineno - 1) + "\n" + body
    signature = f"{node.name}({ast.unparse(node.args)})"
    first = summary(doc)
    kinds = ["body", "body", "write", "docstring", "explain", "explain"]
    rng.shuffle(kinds)
    for kind in dict.fromkeys(kinds):
        if kind == "body":
            ask = rng.choice(["Complete the body of this Python function.", "Write the body of this function."])
            yield kind, f"{ask}\n\n{code_block(head)}", code_block(body)
        elif kind == "write":
            ask = rng.choice([f"Write a Python function `{signature}`.", f"Implement `{signature}` in Python."])
            yield kind, f"{ask} {first}", code_block(whole)
        elif kind == "docstring":
            yield kind, f"Write a docstring for this function.\n\n{code_block(bare)}", doc
        else:
            name = node.name
            ask = rng.choice(["What does this function do?", "Explain this function.", f"What does `{name}` do?"])
            yield kind, f"{ask}\n\n{code_block(bare)}", first


def class_examples(
    node: ast.ClassDef, lines: list[str], module: str, rng: random.Random
) -> Iterator[tuple[str, str, str]]:
    """(kind, prompt, answer) that one documented class allows."""
    documented = docstring_of(node)
    if documented is None or node.end_lineno is None:
        return
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    name = f"{node.name}({bases})" if bases else node.name
    whole = lines_of(lines, min([node.lineno, *(d.lineno for d in node.decorator_list)]), node.end_lineno)
    yield "class", f"Write a Python class `{name}`. {summary(documented[1])}", code_block(whole)
    ask = rng.choice([f"What is `{module}.{node.name}`?", f"Describe the class `{node.name}` of `{module}`."])
    yield "explain", ask, documented[1]


def continuation_examples(tree: ast.Module, lines: list[str], rng: random.Random) -> Iterator[tuple[str, str, str]]:
    """(kind, prompt, answer): the next top-level statements of a file after some that are shown."""
    ends = [node.end_lineno or node.lineno for node in tree.body]
    stop = 0
    while stop < len(ends) - 1:
        begin = stop
        stop = begin + 1
        while stop < len(ends) - 1 and len(lines_of(lines, ends[begin - 1] + 1 if begin else 1, ends[stop])) < 450:
            stop += 1
        shown = lines_of(lines, ends[begin - 1] + 1 if begin else 1, ends[stop - 1])
        last = stop
        while (
            last + 1 < len(ends)
            and len(lines_of(lines, ends[stop - 1] + 1, ends[last + 1])) < 900
            and rng.random() < 0.7
        ):
            last += 1
        answer = lines_of(lines, ends[stop - 1] + 1, ends[last])
        ask = rng.choice(["Continue this Python file.", "Complete this Python code."])
        yield "continue_code", f"{ask}\n\n{code_block(shown)}", code_block(answer)
        stop = last + 1


def python_examples(path: str, text: str, rng: random.Random) -> Iterator[tuple[str, str, str, str]]:
    """(kind, prompt, answer, name) found in a Python file; at most one for a function, two for a class."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")
    module = re.sub(r"/__init__$", "", path.removesuffix(".py")).replace("/", ".")
    for node in ast.walk(tree):
        if isinstance(node, Function):
            for found in function_examples(node, lines, rng):
                if is_fit(*found[1:]):
                    yield *found, node.name
                    break
        elif isinstance(node, ast.ClassDef):
            for found in class_examples(node, lines, module, rng):
                yield *found, node.name
    for found in continuation_examples(tree, lines, rng):
        yield *found, ""


def document_examples(text: str, rng: random.Random) -> Iterator[tuple[str, str, str, str]]:
    """(kind, prompt, answer, name) found in documentation: a passage to continue, a heading to write about."""
    paragraphs = [p for p in re.split(r"\n{2,}", text) if p.strip()]
    position = 0
    while position < len(paragraphs) - 1:
        shown, position = paragraphs[position], position + 1
        heading = re.match(r"^(?:#+ (.{4,60})|([A-Z].{3,60})\n[=\-~^*]{4,})$", shown.strip())
        while not heading and len(shown) < 120 and position < len(paragraphs) - 1:
            shown, position = shown + "\n\n" + paragraphs[position], position + 1
        answer, position = paragraphs[position], position + 1
        while position < len(paragraphs) and len(answer) + len(paragraphs[position]) < 700 and rng.random() < 0.7:
            answer, position = answer + "\n\n" + paragraphs[position], position + 1
        if heading:
            title = heading[1] or heading[2]
            ask = rng.choice([f"Explain: {title}", f"Write a section of documentation titled “{title}”."])
            yield "topic", ask.replace("“", '"').replace("”", '"'), answer, title
        else:
            yield "continue_docs", f"Continue this documentation.\n\n{shown}", answer, ""


def is_fit(prompt: str, answer: str) -> bool:
    """Whether an exchange has a useful length."""
    return len(prompt) <= MAX_PROMPT_CHARS and MIN_ANSWER_CHARS <= len(answer) <= MAX_ANSWER_CHARS


def examples(document: dict[str, str], rng: random.Random) -> Iterator[Example]:
    """Every exchange that ``document`` (a row of documents.jsonl) allows."""
    place = f"{document['package']}/{document['path']}"
    text = document["text"]
    found = python_examples(document["path"], text, rng) if document["kind"] == "py" else document_examples(text, rng)
    for kind, prompt, answer, name in found:
        if is_fit(prompt, answer):
            yield Example(kind, prompt, answer, f"{place}::{name}" if name else place)
