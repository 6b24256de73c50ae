"""The shape of the house: arrows go down only, rooms stay small, nothing unsafe, and the README's map is true."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "dspark"
ARROWS = {
    "kernels": set(),
    "layers": {"kernels"},
    "target": {"layers", "kernels"},
    "draft": {"layers", "kernels"},
    "data": set(),
    "verifier": {"target", "kernels", "draft"},  # draft: its weights for kernels
    "record": {"target", "verifier", "data", "layers", "kernels"},  # layers: states in eight bits; kernels: to a GPU
    "train": {"draft", "record", "data", "kernels", "layers"},  # layers: the same, widened where they are read
    "export": {"draft"},
    "decode": {"draft", "target", "verifier"},
    "eval": {"decode", "data", "draft"},  # a measurement holds the draft that it hands on to decode
}
GROUND = {"config", "errors", "types", "distributed", "files", "model_folder", "provenance"}
MAX_LINES, MAX_FILES, MAX_STATEMENTS, MAX_PARAMETERS = 400, 10, 40, 6
SOURCES = sorted(PACKAGE.rglob("*.py"))
DOORS = [ROOT / "train.py", *sorted((ROOT / "eval").glob("*.py")), *sorted((ROOT / "data").rglob("*.py"))]


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


def test_a_room_imports_only_rooms_below_it() -> None:
    wrong = []
    for path in SOURCES:
        room = room_of(path)
        if room in GROUND | {"cli", "__init__"}:
            continue
        for name in imports(ast.parse(path.read_text())):
            if name.split(".")[0] in {"train", "eval"} or name.startswith("dspark."):
                other = name.removeprefix("dspark.").split(".")[0]
                if other not in ARROWS[room] | GROUND | {room}:
                    wrong.append(f"{path.relative_to(ROOT)}: {room} imports {name}")
    assert not wrong, wrong


def test_the_commands_load_where_triton_is_missing_and_without_what_takes_seconds() -> None:
    heavy = "".join(f"sys.modules[{name!r}] = " for name in ("triton", "matplotlib", "torch._dynamo"))
    program = f"import sys; {heavy}None; import dspark.cli.main, dspark.verifier, train"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SOURCES + DOORS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_stays_small_and_says_what_it_is(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert len(text.splitlines()) <= MAX_LINES
    assert ast.get_docstring(tree), "every module has a docstring"
    if PACKAGE / "kernels" in path.parents:
        return  # tensors in, tensors out: an operation takes every tensor by name, and a kernel is one function
    for function in functions(tree):
        statements = sum(isinstance(node, ast.stmt) for node in ast.walk(function)) - 1
        given = [a.arg for a in function.args.args + function.args.kwonlyargs if a.arg not in {"self", "cls"}]
        options = {"cli"} & set(path.relative_to(ROOT).parts)
        assert statements <= MAX_STATEMENTS, f"{function.name} has {statements} statements"
        assert options or len(given) <= MAX_PARAMETERS, f"{function.name} has {len(given)} parameters"


@pytest.mark.parametrize("folder", sorted({path.parent for path in SOURCES}), ids=lambda path: path.name)
def test_a_folder_holds_few_files(folder: Path) -> None:
    assert len([path for path in folder.glob("*.py") if path.name != "__init__.py"]) <= MAX_FILES


@pytest.mark.parametrize("path", SOURCES + DOORS, ids=lambda path: str(path.relative_to(ROOT)))
def test_nothing_is_unpickled_and_no_failure_is_swallowed(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ExceptHandler):
            name = getattr(node.type, "id", None)
            assert node.type is not None, "a bare except"
            assert name not in {"Exception", "BaseException"}, "a broad except"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in {"torch.load", "pickle.load", "pickle.loads", "eval", "exec", "yaml.load"}, called
            unsafe = [k for k in node.keywords if k.arg == "trust_remote_code" and getattr(k.value, "value", 1)]
            assert not unsafe, "remote code"
        if isinstance(node, ast.Import | ast.ImportFrom):
            assert "pickle" not in ast.unparse(node)


def test_a_room_reads_no_arguments_and_no_environment() -> None:
    for path in SOURCES:
        if room_of(path) != "cli":
            text = path.read_text()
            assert not re.search(r"sys\.argv|argparse|os\.environ|getenv|\bprint\(|typer", text), path


def test_the_map_in_the_readme_names_every_room() -> None:
    readme = (ROOT / "README.md").read_text()
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and any(path.glob("*.py"))}
    block = re.search(r"## Map\n+```\n(.*?)```", readme, re.DOTALL)
    assert block, "the README has a map"
    named = set(re.findall(r"^  ([a-z_]+)/ ", block.group(1), re.MULTILINE))
    assert named == rooms
