"""Choose the text the nano target learns from: permissive Python source and English docs, without near copies."""

import argparse
import hashlib
import json
import lzma
import re
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from email import message_from_string
from pathlib import Path


def words(text: str) -> frozenset[str]:
    """The words of ``text``."""
    return frozenset(text.split())


HELD_OUT_MODULES = words(
    "statistics textwrap heapq fractions shlex calendar difflib configparser sched colorsys cmd pprint graphlib "
    "bisect zipapp wsgiref imaplib queue"
)
"""Standard library modules never trained on, with their documentation pages."""
HELD_OUT_PAGES = frozenset({"howto/sorting", "howto/descriptor", "tutorial/errors", "faq/gui", "orm/cascades"})
HELD_OUT_PACKAGES = words("structlog marshmallow loguru simpy uvicorn bottle lark isort pyparsing")
PERMISSIVE = re.compile(
    r"\b(MIT|BSD|Apache|PSF|Python[- ]2|Python Software Foundation|ISC|HPND|Unlicense|Zlib)\b", re.I
)
COPYLEFT = re.compile(r"GPL|GNU|MPL|Mozilla|AGPL|EUPL|Artistic|Proprietary|non-?commercial", re.I)
SKIPPED_FOLDERS = words(
    "test tests testing _vendor vendor vendored _vendored third_party extern externals locale locales i18n migrations "
    "idlelib lib2to3 turtledemo __pycache__ encodings generated _generated data datasets_data pydoc_data testdata "
    "fixtures static site-packages translations node_modules changelog unreleased_13 releases"
)
SKIPPED_NAMES = re.compile(
    r"^(test_.*|.*_test|conftest|.*_pb2|.*_pb2_grpc|_parser|.*_tables|.*parsetab|LICENSE|COPYING|AUTHORS|NOTICE|CHANGE.*|"
    r"NEWS|HISTORY|changelog|requirements.*|top_level|entry_points|SOURCES|contents|genindex|constraints.*|.*license.*)$",
    re.I,
)
MAX_FILE_BYTES = 200_000
MIN_FILE_BYTES = 300


@dataclass(frozen=True)
class Document:
    """One file of the corpus; ``text`` lacks the licence header, ``sha256`` is of the file as found."""

    package: str
    version: str
    licence: str
    path: str
    kind: str
    split: str
    sha256: str
    text: str


@dataclass(frozen=True)
class Origin:
    """Where a file comes from."""

    package: str
    version: str
    licence: str


def licence_of(metadata: str) -> str | None:
    """The short licence of a distribution from its metadata, or None when it is not clearly permissive."""
    message = message_from_string(metadata)
    classifiers = [c for c in message.get_all("Classifier") or [] if c.startswith("License")]
    first_line = (message.get("License") or "").strip().split("\n")[0][:60]
    names = [message.get("License-Expression") or "", first_line, *(c.rsplit("::", 1)[-1].strip() for c in classifiers)]
    names = [name for name in names if name]
    if any(COPYLEFT.search(name) for name in names) or not any(PERMISSIVE.search(name) for name in names):
        return None
    return next(name for name in names if PERMISSIVE.search(name))


def wheel_files(folder: Path) -> Iterator[tuple[Origin, str, bytes]]:
    """Python files and the long description of every permissive wheel in ``folder``."""
    for path in sorted(folder.glob("*.whl")):
        package, version = path.name.split("-")[:2]
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
            metadata = next(
                archive.read(n).decode("utf-8", "replace") for n in names if n.endswith(".dist-info/METADATA")
            )
            licence = licence_of(metadata)
            if licence is None:
                print(f"left out, licence not clearly permissive: {path.name}")
                continue
            origin = Origin(package.lower().replace("_", "-"), version, licence)
            yield origin, "README.md", str(message_from_string(metadata).get_payload()).encode()
            for name in names:
                if name.endswith((".py", ".md", ".rst")):
                    yield origin, name, archive.read(name)


def sdist_files(folder: Path) -> Iterator[tuple[Origin, str, bytes]]:
    """Documentation files of every permissive source archive in ``folder``."""
    for path in sorted(folder.glob("*.tar.gz")):
        package, version = path.name.removesuffix(".tar.gz").rsplit("-", 1)
        with tarfile.open(path) as archive:
            members = {m.name: m for m in archive.getmembers() if m.isfile()}
            info = next(m for n, m in members.items() if n.count("/") == 1 and n.endswith("PKG-INFO"))
            licence = licence_of(archive.extractfile(info).read().decode("utf-8", "replace"))
            if licence is None:
                print(f"left out, licence not clearly permissive: {path.name}")
                continue
            origin = Origin(package.lower().replace("_", "-"), version, licence)
            for name, member in sorted(members.items()):
                if name.endswith((".rst", ".md", ".txt")) and member.size <= MAX_FILE_BYTES:
                    yield origin, name.split("/", 1)[1], archive.extractfile(member).read()


def installed_files(folder: Path, packages: Iterable[str]) -> Iterator[tuple[Origin, str, bytes]]:
    """Python files of the named distributions installed in ``folder`` (a site-packages folder)."""
    for package in packages:
        info = next(folder.glob(f"{package}-*.dist-info"))
        origin = Origin(package, info.name.split("-")[1], licence_of((info / "METADATA").read_text()) or "BSD-3-Clause")
        for path in sorted((folder / package).rglob("*.py")):
            yield origin, str(path.relative_to(folder)), path.read_bytes()


def tree_files(folder: Path, origin: Origin) -> Iterator[tuple[Origin, str, bytes]]:
    """Python and documentation files below ``folder``."""
    for path in sorted(folder.rglob("*")):
        if path.suffix in {".py", ".rst", ".md", ".txt"} and path.is_file():
            yield origin, str(path.relative_to(folder)), path.read_bytes()


def without_licence_header(text: str) -> str:
    """Drop leading comment lines when they speak of copyright or licence; every file would repeat them otherwise."""
    lines = text.split("\n")
    end = 0
    while end < len(lines) and (lines[end].startswith("#") or not lines[end].strip()):
        end += 1
    header = "\n".join(lines[:end])
    return "\n".join(lines[end:]) if re.search(r"licen[sc]e|copyright|coding[:=]", header, re.I) else text


def is_prose_or_code(text: str) -> bool:
    """Whether the text looks written by hand in ASCII English, not data, a table, minified or generated."""
    lines = text.split("\n")
    longest, mean = max(map(len, lines)), len(text) / len(lines)
    if (
        longest > 500
        or mean > 90
        or re.search(r"generated by|do not edit|autogenerated|auto-generated", text[:1500], re.I)
    ):
        return False
    digits = sum(map(str.isdigit, text)) / len(text)
    letters = sum(map(str.isalpha, text)) / len(text)
    return digits < 0.10 and letters > 0.45 and sum(ord(c) > 127 for c in text) < 0.005 * len(text)


def clean(name: str, raw: bytes) -> tuple[str, str] | None:
    """(kind, text) of a file that is worth reading, else None."""
    parts = name.split("/")
    stem = parts[-1].split(".")[0]
    if (
        not MIN_FILE_BYTES <= len(raw) <= MAX_FILE_BYTES
        or SKIPPED_FOLDERS & set(parts[:-1])
        or SKIPPED_NAMES.match(stem)
    ):
        return None
    try:
        text = raw.decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None
    if re.search(r"[\0\r]|<\||</?(think|role|tool_call)>", text):
        return None
    if name.endswith(".py"):
        kind, text = "py", without_licence_header(text)
    else:
        kind = "doc"
        text = "\n".join(line for line in text.split("\n") if "img.shields.io" not in line and "<img" not in line)
        words = len(text.split())
        if (
            len(re.findall(r"\b(the|of|and|is|to|in)\b", text)) * 40 < words
            or len(re.findall("http|@", text)) * 25 > words
        ):
            return None
    text = re.sub(r"[ \t]+\n", "\n", text)
    text = re.sub(r"\n{4,}", "\n\n\n", text).strip("\n") + "\n"
    return (kind, text) if len(text) >= MIN_FILE_BYTES and is_prose_or_code(text) else None


def is_held_out(origin: Origin, name: str) -> bool:
    """Whether the file belongs to a module that is never trained on."""
    parts = re.split(r"[/.]", name)
    if origin.package in {"cpython", "python3.11-doc"} and HELD_OUT_MODULES & set(parts):
        return True
    return origin.package in HELD_OUT_PACKAGES or any(page in name for page in HELD_OUT_PAGES)


def choose(files: Iterable[tuple[Origin, str, bytes]], max_package_bytes: int) -> Iterator[Document]:
    """Documents of ``files``: held-out ones first, then the rest without near copies (by lines) of anything before.

    A file is a near copy when half of its long lines were seen, or a fifth of them in held-out text.
    """
    cleaned = []
    for origin, name, raw in files:
        result = clean(name, raw)
        if result is not None:
            split = "heldout" if is_held_out(origin, name) else "train"
            cleaned.append(
                Document(*vars(origin).values(), name, result[0], split, hashlib.sha256(raw).hexdigest(), result[1])
            )
    first = {"cpython": 0, "python3.11-doc": 1}
    cleaned.sort(key=lambda d: (d.split, first.get(d.package, 2), d.kind, hashlib.sha256(d.path.encode()).digest()))
    seen: set[int] = set()
    held_out: set[int] = set()
    taken: dict[str, int] = {}
    for document in cleaned:
        lines = {hash(line.strip()) for line in document.text.split("\n") if len(line.strip()) >= 25}
        copied = len(lines & seen) > 0.5 * len(lines)
        leaks = document.split == "train" and len(lines & held_out) > 0.2 * len(lines)
        is_capped = document.kind == "py" and document.package != "cpython"
        if copied or leaks or not lines or (is_capped and taken.get(document.package, 0) > max_package_bytes):
            continue
        taken[document.package] = taken.get(document.package, 0) + len(document.text) * is_capped
        seen |= lines
        if document.split == "heldout":
            held_out |= lines
        yield document


def main() -> None:
    """Write documents.jsonl (work file) and corpus.tsv.xz (the list that is kept)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wheels", type=Path, required=True, help="folder of .whl files")
    parser.add_argument(
        "--sdists", type=Path, required=True, help="folder of .tar.gz source archives, read for their docs"
    )
    parser.add_argument("--stdlib", type=Path, nargs="+", required=True, help="lib/python3.x folders, newest first")
    parser.add_argument(
        "--python-docs", type=Path, required=True, help="html/_sources folder of the Python documentation"
    )
    parser.add_argument(
        "--sqlalchemy-docs", type=Path, required=True, help="rst folder of the SQLAlchemy documentation"
    )
    parser.add_argument("--site-packages", type=Path, required=True, help="read for torch")
    parser.add_argument("--max-package-bytes", type=int, default=1_300_000, help="Python source of one package")
    parser.add_argument("--list", type=Path, required=True, help="corpus.tsv.xz to write")
    parser.add_argument("--out", type=Path, required=True, help="documents.jsonl to write")
    args = parser.parse_args()
    files: list[tuple[Origin, str, bytes]] = []
    for folder in args.stdlib:
        files += tree_files(folder, Origin("cpython", folder.name.removeprefix("python"), "PSF-2.0"))
    files += tree_files(args.python_docs, Origin("python3.11-doc", "3.11.2", "PSF-2.0"))
    files += tree_files(args.sqlalchemy_docs, Origin("python-sqlalchemy-doc", "1.4.46", "MIT"))
    files += sdist_files(args.sdists)
    files += wheel_files(args.wheels)
    files += installed_files(args.site_packages, ["torch"])
    rows = ["package\tversion\tlicence\tpath\tkind\tsplit\tbytes\tsha256_16"]
    with args.out.open("w") as out:
        for document in choose(files, args.max_package_bytes):
            d = document
            rows.append(
                "\t".join([d.package, d.version, d.licence, d.path, d.kind, d.split, str(len(d.text)), d.sha256[:16]])
            )
            out.write(json.dumps(vars(document)) + "\n")
    args.list.write_bytes(lzma.compress("\n".join([rows[0], *sorted(rows[1:])]).encode() + b"\n", preset=9))


if __name__ == "__main__":
    main()
