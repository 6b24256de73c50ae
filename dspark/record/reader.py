"""A finished record, opened at random: every shard's checksum is verified before its first tensor is used."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from safetensors import safe_open

from dspark.errors import RecordError
from dspark.files import file_sha256
from dspark.record.format import ShardEntry, read_manifest
from dspark.types import RecordedSequence


@dataclass(frozen=True)
class _Shard:
    file: Any
    offsets_S1: torch.Tensor
    hidden_offsets_S1: torch.Tensor
    ids_N: torch.Tensor
    loss_mask_N: torch.Tensor


class RecordReader:
    """The sequences of a record: ``len(reader)``, ``reader[i]``. Only the asked-for rows are read from disk.
    Raises: RecordError when the folder holds no record, an unfinished one, or a damaged manifest.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.manifest = read_manifest(self.folder)
        if not self.manifest.is_complete:
            done = f"{sum(shard.num_sequences for shard in self.manifest.shards)} of {len(self)}"
            raise RecordError(f"{self.folder}: {done} sequences are recorded; run dspark record again to finish")
        self._starts = [0, *accumulate(shard.num_sequences for shard in self.manifest.shards)]
        self._shards: dict[int, _Shard] = {}
        self._opening = Lock()

    def __len__(self) -> int:
        return self.manifest.num_sequences

    def __getitem__(self, index: int) -> RecordedSequence:
        """Sequence ``index`` (0-based). Raises: IndexError; RecordError naming a truncated or altered shard."""
        shard, row = self._find(index)
        begin, end = shard.offsets_S1[row : row + 2].tolist()
        hidden_begin, hidden_end = shard.hidden_offsets_S1[row : row + 2].tolist()
        loss_mask_T = shard.loss_mask_N[begin:end]
        taps_TLD = shard.file.get_slice("taps_NLD")[begin:end]
        last_hidden_TD = taps_TLD.new_zeros(end - begin, self.manifest.hidden_size)
        last_hidden_TD[:-1][loss_mask_T[1:]] = shard.file.get_slice("last_hidden_MD")[hidden_begin:hidden_end]
        return RecordedSequence(shard.ids_N[begin:end], loss_mask_T, taps_TLD, last_hidden_TD)

    def text(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids_T and loss_mask_T of a sequence, without its states. Raises: as ``reader[index]``."""
        shard, row = self._find(index)
        begin, end = shard.offsets_S1[row : row + 2].tolist()
        return shard.ids_N[begin:end], shard.loss_mask_N[begin:end]

    def label_logprobs(self, index: int) -> torch.Tensor:
        """The target's log-probability [M] of every predicted token of a sequence. Raises: as ``reader[index]``."""
        shard, row = self._find(index)
        begin, end = shard.hidden_offsets_S1[row : row + 2].tolist()
        logprobs_M: torch.Tensor = shard.file.get_slice("label_logprobs_M")[begin:end]
        return logprobs_M

    def _find(self, index: int) -> tuple[_Shard, int]:
        """The shard that holds a sequence, and the sequence's row in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.folder}: sequence {index} of {len(self)}")
        number = bisect_right(self._starts, index) - 1
        with self._opening:  # threads read, and a shard's checksum is taken once
            shard = self._shards.get(number) or self._open(number)
        return shard, index - self._starts[number]

    def _check_layout(self, path: Path, file: Any, entry: ShardEntry) -> None:
        """Refuse a shard whose tensors are not those that the manifest describes; the numbers are not looked at."""
        width, num_taps, dtype = self.manifest.hidden_size, len(self.manifest.target_layer_ids), self.manifest.dtype
        tokens, states = entry.num_tokens, entry.num_supervised
        expected: dict[str, tuple[int, ...]] = {"offsets_S1": (entry.num_sequences + 1,), "ids_N": (tokens,)}
        expected |= {"loss_mask_N": (tokens,), "taps_NLD": (tokens, num_taps, width)}
        expected |= {"last_hidden_MD": (states, width), "label_logprobs_M": (states,)}
        names = set(file.keys())
        found = {name: tuple(file.get_slice(name).get_shape()) if name in names else None for name in expected}
        wrong = [f"{key} is {found[key]}, expected {shape}" for key, shape in expected.items() if found[key] != shape]
        if not wrong and file.get_slice("taps_NLD")[:0].dtype != self.manifest.torch_dtype:
            wrong = [f"taps_NLD is not {dtype}"]
        if not wrong and not _is_rising_to(file.get_tensor("offsets_S1").tolist(), entry.num_tokens):
            wrong = [f"offsets_S1 do not rise from 0 to {entry.num_tokens}"]
        if wrong:
            raise RecordError(f"{path}: not what the manifest says: {'; '.join(wrong)}; delete it, run dspark record")

    def _open(self, number: int) -> _Shard:
        entry = self.manifest.shards[number]
        path = self.folder / entry.file
        found = file_sha256(path) if path.is_file() else "no file"
        if found != entry.sha256:
            size = path.stat().st_size if path.is_file() else 0
            raise RecordError(
                f"{path}: found sha256 {found} ({size} bytes), expected {entry.sha256} ({entry.num_bytes} bytes); "
                "the shard is damaged: delete it and run dspark record again, which writes only what is missing"
            )
        file: Any = safe_open(path, framework="pt")
        self._check_layout(path, file, entry)
        loss_mask_N = file.get_tensor("loss_mask_N")
        offsets_S1 = file.get_tensor("offsets_S1")
        hidden_offsets_N1 = torch.cat([torch.zeros(1, dtype=torch.int64), loss_mask_N.cumsum(0)])
        shard = _Shard(file, offsets_S1, hidden_offsets_N1[offsets_S1], file.get_tensor("ids_N").long(), loss_mask_N)
        self._shards[number] = shard
        return shard


def _is_rising_to(offsets: list[int], end: int) -> bool:
    return offsets == sorted(set(offsets)) and (offsets[0], offsets[-1]) == (0, end)
