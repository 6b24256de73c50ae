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

LOGPROB_TOLERANCE = {torch.bfloat16: 0.2, torch.float32: 2e-3, torch.float64: 2e-3}
"""How far, on average over a sequence, a label's log-probability may lie from the one recomputed with the head."""
CHECKED_ROWS = 256
"""Of the first sequence of a shard."""


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
        return self._read(index)[0]

    def text(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids_T and loss_mask_T of a sequence, without its states. Raises: as ``reader[index]``."""
        shard, row = self._find(index)
        begin, end = shard.offsets_S1[row : row + 2].tolist()
        return shard.ids_N[begin:end], shard.loss_mask_N[begin:end]

    def check(self, head_VD: torch.Tensor | None = None) -> None:
        """Verify every shard's checksum and, given the target's head, that it gives the recorded log-probabilities of
        the labels in the first sequence of every shard. Raises: RecordError naming the shard.
        """
        wanted = [self.manifest.vocab_size, self.manifest.hidden_size]
        if head_VD is not None and list(head_VD.shape) != wanted:
            raise RecordError(f"{self.folder}: found a head of {list(head_VD.shape)}, expected {wanted} as recorded")
        tolerance = LOGPROB_TOLERANCE[self.manifest.torch_dtype]
        for start, entry in zip(self._starts, self.manifest.shards, strict=False):
            sequence, recorded_M = self._read(start)
            if head_VD is None:
                continue
            is_next_T = sequence.loss_mask_T[1:]
            hidden_MD = sequence.last_hidden_TD[:-1][is_next_T][:CHECKED_ROWS]
            found_M = label_logprobs(hidden_MD, sequence.ids_T[1:][is_next_T][:CHECKED_ROWS], head_VD)
            error = float((found_M - recorded_M[:CHECKED_ROWS]).abs().mean())
            if not error <= tolerance:
                raise RecordError(
                    f"{self.folder / entry.file}: with this head the tokens' log-probabilities differ from the "
                    f"recorded ones by {error:.3g} nats on average, expected at most {tolerance}; "
                    f"use the target that was recorded, {self.manifest.target}"
                )

    def _find(self, index: int) -> tuple[_Shard, int]:
        """The shard that holds a sequence, and the sequence's row in it."""
        if not 0 <= index < len(self):
            raise IndexError(f"{self.folder}: sequence {index} of {len(self)}")
        number = bisect_right(self._starts, index) - 1
        with self._opening:  # threads read, and a shard's checksum is taken once
            shard = self._shards.get(number) or self._open(number)
        return shard, index - self._starts[number]

    def _read(self, index: int) -> tuple[RecordedSequence, torch.Tensor]:
        shard, row = self._find(index)
        begin, end = shard.offsets_S1[row : row + 2].tolist()
        hidden_begin, hidden_end = shard.hidden_offsets_S1[row : row + 2].tolist()
        loss_mask_T = shard.loss_mask_N[begin:end]
        taps_TLD = shard.file.get_slice("taps_NLD")[begin:end]
        last_hidden_TD = taps_TLD.new_zeros(end - begin, self.manifest.hidden_size)
        last_hidden_TD[:-1][loss_mask_T[1:]] = shard.file.get_slice("last_hidden_MD")[hidden_begin:hidden_end]
        sequence = RecordedSequence(shard.ids_N[begin:end], loss_mask_T, taps_TLD, last_hidden_TD)
        return sequence, shard.file.get_slice("label_logprobs_M")[hidden_begin:hidden_end]

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


def label_logprobs(hidden_MD: torch.Tensor, labels_M: torch.Tensor, head_VD: torch.Tensor) -> torch.Tensor:
    """The labels' log-probabilities [M] under the target's head, on the CPU, in float32 (float64 of float64 states)."""
    dtype = torch.promote_types(hidden_MD.dtype, torch.float32)
    logits_MV = hidden_MD.to(head_VD.device, dtype) @ head_VD.to(dtype).T
    return torch.log_softmax(logits_MV, -1).gather(1, labels_M[:, None].to(head_VD.device))[:, 0].cpu()
