"""A mixture of prompts from several sources: filtered, without repetitions, in proportion; streamed to two files."""

import heapq
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import sha256
from itertools import islice, pairwise
from pathlib import Path
from shutil import rmtree
from typing import Annotated, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, model_validator

from dspark.config import NonNegativeInt, PositiveFloat, PositiveInt, Section, Share, read_back, read_yaml, validated
from dspark.data.conversations import Conversation, parse_conversation, source_rows
from dspark.data.duplicates import Fingerprints
from dspark.errors import ConfigError, PromptError
from dspark.files import partial_of, put_in_place, write_whole

TRAIN_FILE, HELD_OUT_FILE, REPORT_FILE = "train.jsonl", "held_out.jsonl", "mixture.json"
BATCH_ROWS = 1024
FATES = ("of_tasks", "repeated", "near", "left", "held_out", "taken")
"""What becomes of a usable row, as ``SourceCounts`` names it; its fate is the place here, and from ``held_out`` on the
row is kept."""
OF_TASKS, REPEATED, NEAR, LEFT, HELD_OUT, TAKEN = range(len(FATES))
OnRow = Callable[[Any], None]


class Source(Section):
    """Prompts of one kind, and which of them are wanted."""

    path: str
    """A JSONL or parquet file, or a hub name; each row has ``messages``, ``prompt``, ``turns`` or ``text``."""
    split: str = "train"
    prompt_column: str | None = None
    """What holds the prompt in rows of another kind."""
    weight: PositiveFloat | None = None
    """Share of the mixture beside the other weights; all sources have one, or none has and every row is taken."""
    held_out: NonNegativeInt = 0
    """Rows that are kept for comparisons, drawn by the seed."""
    min_characters: NonNegativeInt = 1
    max_characters: PositiveInt | None = None
    """Of what the user says."""
    where: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Columns that must hold just this, ``{language: English}``; YAML reads ``no`` and ``yes`` as truth values."""


def _of_path(source: Any) -> Any:
    return {"path": source} if isinstance(source, str) else source


class Mixture(Section):
    """The description of a mixture, a YAML file."""

    sources: tuple[Annotated[Source, BeforeValidator(_of_path)], ...]
    """A path alone is a source, too."""
    num_rows: PositiveInt | None = None
    """Rows to take in all, refused if the sources do not give them; without it as many as the weights allow."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    near_similarity: Share | None = 0.8
    """Rows as near as this to an earlier one are left out; null: only repetitions are."""
    apart_from: tuple[str, ...] = ()
    """Evaluation tasks, or files of prompts, of which no row may be a copy."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.sources:
            raise ValueError("sources: there must be one at least")
        if len({source.weight is None for source in self.sources}) > 1:
            raise ValueError("sources: either every source has a weight or none has")
        return self


class SourceCounts(Section):
    """What became of the rows of one source; the titles are what tables call it."""

    path: str = Field(title="rows")
    read: int = Field(0, title="read")
    unusable: int = Field(0, title="without a prompt")
    filtered: int = Field(0, title="filtered out")
    of_tasks: int = Field(0, title="in a task")
    repeated: int = Field(0, title="there before")
    near: int = Field(0, title="nearly the same")
    left: int = Field(0, title="not drawn")
    held_out: int = Field(0, title="held out")
    taken: int = Field(0, title="taken")

    def rows(self) -> list[tuple[str, str]]:
        """Every title with its value as text, the path first."""
        return [(str(field.title), str(getattr(self, name))) for name, field in type(self).model_fields.items()]


class MixtureReport(Section):
    """What a folder of mixed prompts was made from, and what became of every row."""

    format: Literal["dspark-mixture-1"] = "dspark-mixture-1"
    mixture: Mixture
    source_bytes: tuple[int, ...]
    """Of files; of a hub data set 0."""
    apart_sha256: str
    """Over the prompts of ``mixture.apart_from``."""
    written_bytes: tuple[int, int]
    """Of train.jsonl and held_out.jsonl."""
    sources: tuple[SourceCounts, ...]


def load_mixture(path: Path) -> Mixture:
    """Raises: ConfigError naming the file and the key."""
    return validated(Mixture, read_yaml(path, "the description of a mixture"), path)


def mix(mixture: Mixture, folder: Path, apart: Iterable[Conversation], on_row: OnRow = lambda _: None) -> MixtureReport:
    """Write train.jsonl, held_out.jsonl and mixture.json (which comes last) into ``folder``; done before: read it.

    The sources are streamed twice: for fingerprints, then for the rows themselves, which come interleaved, so that any
    first part of the file has the proportions of all. Memory: 150 to 450 bytes a row; disk meanwhile: 520.
    ``apart``: the prompts of ``mixture.apart_from``. ``on_row`` is given every row of either pass;
    a line that is not JSON comes as a PromptError, and counts as a row without a prompt if it may.
    Raises: PromptError for a source that cannot be read or has another number of rows the second time, or when nothing
    or too little is left; ConfigError when the folder holds another mixture, or its files had other sizes; RecordError
    for a damaged mixture.json.
    """
    kept_apart = [_asked(conversation) for conversation in apart]
    origin = {
        "mixture": mixture,
        "source_bytes": tuple(_size(Path(source.path)) for source in mixture.sources),
        "apart_sha256": sha256("\0".join(kept_apart).encode("utf-8", "surrogatepass")).hexdigest(),
    }
    report_path = folder / REPORT_FILE
    if report_path.is_file():
        return _read_report(report_path, origin)
    folder.mkdir(parents=True, exist_ok=True)
    counts = [Counter[str]() for _ in mixture.sources]
    scratch = folder / ".fingerprints"
    rmtree(scratch, ignore_errors=True)  # a killed run may have left it
    scratch.mkdir()
    try:
        prints = Fingerprints(scratch)
        _take_in(prints, iter(kept_apart))
        ends = [prints.num_texts]
        for source, count in zip(mixture.sources, counts, strict=True):
            _take_in(prints, (_asked(row) for row in _usable(source, on_row, count)))
            ends.append(prints.num_texts)
        earlier_N, is_near_N = prints.find(mixture.near_similarity)
    finally:
        rmtree(scratch)
    is_of_task_N, is_new_N = earlier_N < ends[0], earlier_N < 0
    fate_N = np.select([is_new_N, is_of_task_N, is_near_N], [LEFT, OF_TASKS, NEAR], REPEATED).astype(np.int8)
    fates = [fate_N[begin:end] for begin, end in pairwise(ends)]
    _draw(mixture, fates)
    for count, fate_M in zip(counts, fates, strict=True):
        count.update(dict(zip(FATES, np.bincount(fate_M, minlength=len(FATES)).tolist(), strict=True)))
    named = zip(mixture.sources, counts, strict=True)
    sources = [SourceCounts.model_validate({"path": source.path, **count}) for source, count in named]
    if not any(source.taken for source in sources):
        told = "; ".join(_tell(source) for source in sources)
        raise PromptError(f"no row is left: {told}; a weight of a source without rows leaves none")
    _write(mixture, folder, fates, on_row)
    report = MixtureReport.model_validate(origin | {"sources": sources, "written_bytes": _written(folder)})
    write_whole(report_path, report.model_dump_json(indent=1))
    return report


def _usable(source: Source, on_row: OnRow, count: Counter[str]) -> Iterator[Conversation]:
    """The rows that can be used and pass the filters; what becomes of the others is counted. Raises: PromptError for a
    source that cannot be read.
    """
    for index, row in source_rows(source.path, source.split):
        on_row(row)
        count["read"] += 1
        try:
            is_given = source.prompt_column is None or not isinstance(row, dict)
            asked = row if is_given else {"prompt": row.get(source.prompt_column), "tools": row.get("tools")}
            conversation = parse_conversation(source.path, index, asked)
        except PromptError:
            count["unusable"] += 1
            continue
        size = len(_asked(conversation))
        is_long = source.max_characters is not None and size > source.max_characters
        if is_long or size < source.min_characters or any(row.get(key) != value for key, value in source.where.items()):
            count["filtered"] += 1
            continue
        yield conversation


def _asked(conversation: Conversation) -> str:
    """What the user says, of which copies are looked for."""
    said = [message["content"] for message in conversation.messages if message["role"] == "user"]
    return "\n".join((*said, *conversation.later_turns)) if conversation.text is None else conversation.text


def _take_in(prints: Fingerprints, texts: Iterator[str]) -> None:
    while batch := list(islice(texts, BATCH_ROWS)):
        prints.add(batch)


def _draw(mixture: Mixture, fates: Sequence[NDArray[np.int8]]) -> None:
    """Change the fate of rows of every source that are left: first those that are held out are drawn, then those that
    are taken.
    """
    generator = np.random.default_rng(mixture.seed)
    orders = [generator.permutation(np.flatnonzero(fate_N == LEFT)) for fate_N in fates]
    rest = [order_M[source.held_out :] for order_M, source in zip(orders, mixture.sources, strict=True)]
    sizes_S = np.array([len(order_M) for order_M in rest])
    weights = [source.weight for source in mixture.sources]
    weights_S = sizes_S if weights[0] is None else np.array(weights, dtype=np.float64)
    shares_S = weights_S / max(weights_S.sum(), 1e-300)
    most = min((int(size / share + 1e-6) for size, share in zip(sizes_S, shares_S, strict=True) if share), default=0)
    if (mixture.num_rows or 0) > most:
        have = ", ".join(f"{size} of {s.path}" for s, size in zip(mixture.sources, sizes_S, strict=True))
        given = f"the sources ({have}) give {most} rows in these proportions"
        raise PromptError(f"num_rows: {given}, {mixture.num_rows} were asked for; ask for less, or change the weights")
    places_S = np.rint(np.cumsum(shares_S) * (mixture.num_rows or most)).astype(np.int64)
    wanted_S = np.minimum(np.diff(places_S, prepend=0), sizes_S)
    for fate_N, source, order_M, rest_M, number in zip(fates, mixture.sources, orders, rest, wanted_S, strict=True):
        fate_N[order_M[: source.held_out]] = HELD_OUT
        fate_N[rest_M[:number]] = TAKEN


def _write(mixture: Mixture, folder: Path, fates: Sequence[NDArray[np.int8]], on_row: OnRow) -> None:
    """Both files, whole."""
    paths = [folder / TRAIN_FILE, folder / HELD_OUT_FILE]
    beside = [partial_of(path) for path in paths]
    streams = (_chosen(*pair, on_row) for pair in zip(mixture.sources, fates, strict=True))
    with open(beside[0], "w", encoding="utf-8") as train, open(beside[1], "w", encoding="utf-8") as held_out:
        for _, fate, line in heapq.merge(*streams):
            (train if fate == TAKEN else held_out).write(line)
    for partial, path in zip(beside, paths, strict=True):
        put_in_place(partial, path)


def _chosen(source: Source, fate_N: NDArray[np.int8], on_row: OnRow) -> Iterator[tuple[float, int, str]]:
    """Place in the mixture from 0 to 1, fate and line of every row that is not left."""
    num_chosen, num_done = int((fate_N >= HELD_OUT).sum()), 0
    rows = _usable(source, on_row, Counter())
    for fate in fate_N.tolist():
        if (conversation := next(rows, None)) is None:
            break
        if fate >= HELD_OUT:
            yield (num_done + 0.5) / num_chosen, fate, _line(conversation)
            num_done += 1
    if num_done < num_chosen or next(rows, None) is not None:
        raise PromptError(f"{source.path}: has other rows than a moment ago; run again when nothing writes there")


def _line(conversation: Conversation) -> str:
    messages, later = conversation.messages, conversation.later_turns
    said: dict[str, Any] = {"turns": [messages[0]["content"], *later]} if later else {"messages": messages}
    said = said if conversation.text is None else {"text": conversation.text}
    row = {"source": conversation.source, "index": conversation.index, **said}
    return json.dumps(row | ({"tools": conversation.tools} if conversation.tools else {}), ensure_ascii=False) + "\n"


def _written(folder: Path) -> tuple[int, int]:
    return _size(folder / TRAIN_FILE), _size(folder / HELD_OUT_FILE)


def _tell(source: SourceCounts) -> str:
    """What became of a source's rows, in a line."""
    return f"{source.path}: " + ", ".join(f"{number} {title}" for title, number in source.rows()[1:] if number != "0")


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0


def _read_report(path: Path, origin: dict[str, Any]) -> MixtureReport:
    found = read_back(MixtureReport, path.read_bytes(), path, "delete its folder to mix again")
    if {name: getattr(found, name) for name in origin} != origin or found.written_bytes != _written(path.parent):
        hint = "give another record.folder, or delete it and the responses made from it"
        raise ConfigError(f"{path.parent}: holds another mixture, or files have changed since; {hint}")
    return found
