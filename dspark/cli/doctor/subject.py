"""What is looked at: a target, its record and its draft, each loaded when it is asked for; and the machine's checks."""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import requires, version
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import torch
from packaging.requirements import Requirement
from torch import Tensor

from dspark.cli.identity import check_pair
from dspark.config import read_yaml
from dspark.data.chat import ChatFormat, encode_prompt
from dspark.data.conversations import Conversation
from dspark.draft.model import DraftModel
from dspark.errors import RecordError
from dspark.export.draft_folder import read_draft
from dspark.model_folder import Checkpoint
from dspark.provenance import versions as installed_versions
from dspark.record.checking import STATES_TOLERANCE, distance
from dspark.record.format import read_manifest
from dspark.record.reader import RecordReader
from dspark.record.writer import check_room
from dspark.target.config import LING_ARCHITECTURE
from dspark.target.loading import TargetFacts, load_target, target_facts
from dspark.target.tokenizer import load_tokenizer
from dspark.types import Target
from dspark.verifier.plan import check_device, free_bytes

WORDS = read_yaml(Path(__file__).with_name("words.yaml"), "the doctor's words")
LEAST_BYTES = 1e9


class Finding(NamedTuple):
    """What a check has to say: whether all is right (None: it does not apply), and what it found."""

    is_right: bool | None
    found: str


class NotApplicable(Exception):
    """Why there is nothing to look at."""


@dataclass
class Subject:
    """A target's folder, and those of its record and draft where they were given. ``told``: errors told already."""

    folder: Path
    record_folder: Path | None
    draft_folder: Path | None
    device: str
    told: frozenset[str] = frozenset()

    @cached_property
    def dtype(self) -> torch.dtype:
        """The record's, in which its states were made; else one that suits the device."""
        with suppress(RecordError):  # which the record's own check reports
            if self.record_folder:
                return read_manifest(self.record_folder).torch_dtype
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @cached_property
    def facts(self) -> TargetFacts:
        return target_facts(self.folder)

    @cached_property
    def checkpoint(self) -> Checkpoint:
        if not any(self.folder.glob("*.safetensors*")):
            raise NotApplicable("no weights are here, in files of safetensors")
        return Checkpoint(self.folder)

    @cached_property
    def chat(self) -> ChatFormat:
        assert self.checkpoint  # a folder without weights need not have a tokenizer
        return ChatFormat(load_tokenizer(self.folder), self.facts.stop_token_ids)

    @property
    def ids_T(self) -> Tensor:
        """A text of some hundred tokens."""
        return encode_prompt(self.chat, Conversation("doctor", 1, text=WORDS["sample"]))

    @cached_property
    def target(self) -> Target[Any]:
        if self.checkpoint.num_parameters * self.dtype.itemsize > free_bytes(self.device):
            raise NotApplicable(f"the weights, in {self.dtype}, do not fit into the memory of {self.device}")
        return load_target(self.folder, dtype=self.dtype, device=self.device)

    def tapping(self, target_layer_ids: tuple[int, ...]) -> Target[Any]:
        """The target, which says the outputs of these layers until others are asked for."""
        self.target.target_layer_ids = target_layer_ids
        return self.target

    @cached_property
    def record(self) -> RecordReader:
        if self.record_folder is None:
            raise NotApplicable("no --record was given")
        return RecordReader(self.record_folder)

    @cached_property
    def draft(self) -> DraftModel:
        if self.draft_folder is None:
            raise NotApplicable("no --draft was given")
        tables = (self.target.embedding_VD, self.target.head_VD)
        check_pair(self.draft_folder, self.folder)
        return read_draft(self.draft_folder, tables, dtype=self.dtype, device=self.device)


def close(subject: Subject, found: Tensor, expected: Tensor, what: str) -> Finding:
    """Whether states are the same but for the order in which they were summed."""
    error = distance(found, expected)
    return Finding(error <= STATES_TOLERANCE[subject.dtype], f"{what} lie {error:.1g} of their norm away")


def versions(subject: Subject) -> Finding:
    """The packages are those that the project is made for."""
    needed = [each for each in map(Requirement, requires("dspark") or ()) if not each.marker or each.marker.evaluate()]
    wrong = [f"{each}: found {version(each.name)}" for each in needed if version(each.name) not in each.specifier]
    return Finding(not wrong, "; ".join(wrong) or ", ".join(map(" ".join, installed_versions().items())))


def gpus(subject: Subject) -> Finding:
    """The verifier's kernels were made for these GPUs, and ranks can exchange: by NCCL, each GPU sees the others'
    memory. Nothing is sent.
    """
    devices = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    if not devices:
        raise NotApplicable("torch finds no GPU: all runs on the CPU")
    for device in devices if subject.facts.architecture == LING_ARCHITECTURE else ():
        check_device(device)
    apart = [f"{pair} are apart" for pair in permutations(devices, 2) if not torch.cuda.can_device_access_peer(*pair)]
    faults = apart if torch.distributed.is_nccl_available() else ["torch has no NCCL"]
    return Finding(not faults, "; ".join(faults[:1]) or ", ".join(map(torch.cuda.get_device_name, devices)))


def memory(subject: Subject) -> Finding:
    """The target's weights fit: into one device, or in parts into all GPUs."""
    ranks = torch.cuda.device_count() if subject.device == "cuda" else 1
    needed, room = subject.checkpoint.num_parameters * subject.dtype.itemsize / ranks, free_bytes(subject.device)
    share = f"{needed / 1e9:.2f} GB of weights in {subject.dtype} on {ranks} x {subject.device}"
    return Finding(needed <= room, f"{share}, which has {room / 1e9:.2f} GB")


def disk(subject: Subject) -> Finding:
    """There is room for checkpoints and reports. What a record takes, dspark plan and dspark record say."""
    check_room(folder := (subject.record_folder or Path()).absolute(), LEAST_BYTES, "needs at least")
    return Finding(True, f"{LEAST_BYTES / 1e9:.0f} GB and more are free at {folder}")
