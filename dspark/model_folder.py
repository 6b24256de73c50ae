"""A model folder's safetensors files: checked by name, read lazily."""

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dspark.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"

_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}


class Checkpoint:
    """The tensors of a model folder, safetensors files only. Only headers are read until a tensor is asked for.

    ``names`` leaves out what the vendor's own loaders skip (specs/ling-3.0.md 2.7).
    Raises: CheckpointError naming the file when there is none, when one is truncated or damaged (also the first tensor
    that is cut off, or that the index places there), or when the index leads out of the folder or is wrong.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self._stored: dict[str, str] = {}
        self._file_of, self.files = _locate(self.folder)
        sought = {file: name for name, file in reversed(self._file_of.items())}
        self._open = {file: _open(file, sought.get(file, "every tensor")) for file in self.files}
        held = {file: set(self._open[file].keys()) for file in self.files}
        if not self._file_of:
            self._file_of = {name: file for file, names in held.items() for name in sorted(names)}
        for name, file in self._file_of.items():
            if name not in held[file]:
                index = self.folder / INDEX_FILE
                raise CheckpointError(f"{index}: places {name} in {file.name}, which does not hold it")

    def rename(self, stored: Mapping[str, str]) -> None:
        """From now on go by other names, each with the file's own; tensors that have none are left out."""
        self._file_of = {name: self._file_of[own] for name, own in stored.items()}
        self._stored = dict(stored)

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor that a loader has to place."""
        return tuple(name for name in self._file_of if not re.match(r"model\.mtp|.*rotary_emb\.inv_freq", name))

    @property
    def num_parameters(self) -> int:
        """Numbers in all of them."""
        return sum(prod(self._slice(name).get_shape()) for name in self.names)

    def check(self, expected: Mapping[str, torch.Tensor], any_dtype: bool = False) -> None:
        """Compare names, shapes and dtypes with what the model needs (meta tensors), before a byte of data is read.
        Raises: CheckpointError listing the missing, the unexpected and the wrong tensors.
        """
        names = set(self.names)
        problems = [f"{name} is missing" for name in expected if name not in names]
        problems += [f"{name} is unexpected" for name in self.names if name not in expected]
        for name, tensor in expected.items():
            if name in names:
                found = self._slice(name)
                wanted = (list(tensor.shape), found.get_dtype() if any_dtype else _DTYPES[tensor.dtype])
                if (found.get_shape(), found.get_dtype()) != wanted:
                    have = f"{found.get_shape()} {found.get_dtype()}"
                    problems.append(f"{name} must be {wanted[0]} {wanted[1]}, found {have}")
        if problems:
            shown = "; ".join(problems[:5]) + (f"; and {len(problems) - 5} more" if len(problems) > 5 else "")
            raise CheckpointError(f"{self.folder}: not the weights that its config.json describes: {shown}")

    def get(self, name: str) -> torch.Tensor:
        """The whole tensor, in the dtype it is stored in. Raises: CheckpointError when the folder does not hold it."""
        if name not in self._file_of:
            raise CheckpointError(f"{self.folder}: {name} is missing")
        tensor: torch.Tensor = self._open[self._file_of[name]].get_tensor(self._stored.get(name, name))
        return tensor

    def get_slice(self, name: str, dim: int, rank: int, world_size: int) -> torch.Tensor:
        """The ``rank``-th of ``world_size`` equal parts along ``dim`` (0 or 1), of a tensor and by ranks that were
        checked; only these bytes are read for dim 0.
        """
        stored = self._slice(name)
        size = stored.get_shape()[dim]
        part = slice(rank * size // world_size, (rank + 1) * size // world_size)
        tensor: torch.Tensor = stored[part] if dim == 0 else stored[:, part]
        return tensor.contiguous()

    def _slice(self, name: str) -> Any:
        return self._open[self._file_of[name]].get_slice(self._stored.get(name, name))


def _locate(folder: Path) -> tuple[dict[str, Path], tuple[Path, ...]]:
    """The index's placement (empty for a single file) and the files, in order."""
    if (folder / SINGLE_FILE).is_file():
        return {}, (folder / SINGLE_FILE,)
    index = folder / INDEX_FILE
    if not index.is_file():
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        found = f"found {', '.join(pickled)}, which could run code when read" if pickled else "found neither"
        raise CheckpointError(f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}; {found}. Convert the weights")
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        placed = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{index}: expected a JSON object with a weight_map to files: {error!r}") from error
    for file in placed.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: names {file!r}; expected safetensors files inside the folder")
    files = tuple(folder / file for file in sorted(set(placed.values())))
    return {name: folder / file for name, file in placed.items()}, files


def _open(file: Path, sought: str) -> Any:
    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file; download it again") from None
    except (SafetensorError, OSError) as error:
        cut = _first_cut(file)
        raise CheckpointError(
            f"{file}: truncated or damaged ({file.stat().st_size} bytes: {error}; "
            f"{f'{cut} is the first tensor cut off' if cut else f'opened to read {sought}'}); download it again"
        ) from error


def _first_cut(file: Path) -> str:
    """The first tensor that a truncated file does not hold to its end; empty where the header cannot be read."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
        try:
            entries = json.loads(stream.read(max(0, min(start, size) - 8)))
            ends = {entry["data_offsets"][1]: name for name, entry in entries.items() if name != "__metadata__"}
            cut = [end for end in ends if start + end > size]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return ""
    return str(ends[min(cut)]) if cut else ""
