"""The ways to decode that an evaluation compares: how they are named, and what writes their texts."""

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from dspark.cli.identity import Pair, check_pair
from dspark.decode.drafter import Draft, LookupDrafter, ModelDrafter
from dspark.decode.engine import CycleSpeaker
from dspark.decode.generation import DraftSpeaker, PlainSpeaker
from dspark.decode.speaking import Speaker
from dspark.draft.model import DraftModel
from dspark.errors import ConfigError
from dspark.eval.measure import DRAFT
from dspark.export.draft_folder import read_draft
from dspark.train.setup import fresh_draft
from dspark.types import Target
from dspark.verifier import Verifier, load_mtp
from dspark.verifier.drafting import BlockDrafter, DraftWeights, MtpDrafter, NoDrafter, draft_weights

PLAIN, HOST = "plain", ("ngram", "confidence", "budget")
"""``HOST``: ways whose blocks have any length, so that the host sees each round through."""
KNOWN = re.compile(r"plain|ngram|untrained|(mtp|drafts|budget):(?!0+$)[0-9]{1,4}|confidence:0?\.(?!0+$)[0-9]+")
FORMS = "plain, ngram, untrained, mtp:N, drafts:N, confidence:P, budget:N or a draft's folder"


def contender_names(listed: str | None) -> tuple[str, ...]:
    """What ``--baselines`` lists, each once, plain first, for greedy texts are compared with it.
    Raises: ConfigError for a name of no form.
    """
    names = tuple(dict.fromkeys(listed.split(","))) if listed else ()
    for name in names:
        if name == DRAFT:
            raise ConfigError(f"--baselines: {name!r} is the draft's own name; write ./{name} for that folder")
        if not (KNOWN.fullmatch(name) or (Path(name) / "config.json").is_file()):
            known = f"expected some of {FORMS}, N from 1, P a decimal between 0 and 1"
            raise ConfigError(f"--baselines: {name!r} is not known; {known}")
    return tuple(sorted(names, key=lambda name: name != PLAIN))


@dataclass(frozen=True)
class Models:
    """What all ways to decode are made of. ``target`` is the reference path's model, or the verifier."""

    pair: Pair
    target: Target[Any]
    draft: DraftModel
    untrained_seed: int
    _weights: dict[int, DraftWeights] = field(default_factory=dict)

    def speakers(self, names: Sequence[str]) -> dict[str, Speaker]:
        """What writes each contender's texts, by name and in order, the draft itself last.
        Raises: ConfigError and DraftMismatchError for what this target or draft does not have.
        """
        return {name: self._speaker(name) for name in names} | {DRAFT: self._drafted(self.target, self.draft)}

    def _speaker(self, name: str) -> Speaker:
        kind, _, value = name.partition(":")
        target, config = self.target, self.draft.config
        makers: dict[str, Callable[[], Speaker]] = {
            PLAIN: self._plain,
            "ngram": lambda: self._on_host(partial(LookupDrafter, config.block_size, config.vocab_size)),
            "untrained": lambda: self._drafted(target, self._untrained()),
            "mtp": lambda: self._mtp(int(value)),
            "drafts": lambda: self._drafted(target, self.draft, int(value)),
            "confidence": lambda: self._on_host(partial(ModelDrafter, self.draft, float(value))),
            "budget": lambda: self._on_host(self.draft, int(value)),
        }
        return makers.get(kind, lambda: self._from_folder(Path(name)))()

    def _plain(self) -> Speaker:
        if isinstance(self.target, Verifier):
            return CycleSpeaker(self.target, NoDrafter(self.target))
        return PlainSpeaker(self.target)

    def _on_host(self, draft: Draft, budget: int | None = None) -> Speaker:
        """Rounds that the host sees through, on the verifier too: no graph holds blocks of any length."""
        if isinstance(self.target, Verifier):
            self.target.capture(self.draft.config.block_size + 1)
        return DraftSpeaker(self.target, draft, budget)

    def _drafted(self, target: Target[Any], draft: DraftModel, num_drafts: int | None = None) -> Speaker:
        if not isinstance(target, Verifier):
            return DraftSpeaker(target, partial(ModelDrafter, draft, num_drafts=num_drafts))
        if id(draft) not in self._weights:
            place = target.weights
            self._weights[id(draft)] = draft_weights(draft, place.shard, place.norm_D.dtype, place.device)
        drafter = BlockDrafter(target, self._weights[id(draft)], num_drafts or draft.config.block_size)
        return CycleSpeaker(target, drafter)

    def _mtp(self, num_drafts: int) -> Speaker:
        if not isinstance(self.target, Verifier):
            raise ConfigError("--baselines: mtp is the verifier's; give --engine verifier, or leave it out")
        place = self.target.weights
        weights = load_mtp(self.pair.folder, place.shard, place.norm_D.dtype, place.device)
        return CycleSpeaker(self.target, MtpDrafter(self.target, weights, num_drafts))

    def _untrained(self) -> DraftModel:
        like = self.draft.fc.weight
        draft = fresh_draft(self.draft.config, self.untrained_seed).to(like.device, like.dtype)
        draft.bind(self.target.embedding_VD, self.target.head_VD)
        return draft.eval()

    def _from_folder(self, folder: Path) -> Speaker:
        config, like = check_pair(folder, self.pair.folder), self.draft.fc.weight
        tables = (self.target.embedding_VD, self.target.head_VD)
        draft = read_draft(folder, tables, dtype=like.dtype, device=str(like.device))
        return self._drafted(tapped(self.target, config.target_layer_ids), draft)


def tapped(target: Target[Any], target_layer_ids: tuple[int, ...]) -> Target[Any]:
    """A target of the same weights that gives the outputs of these layers."""
    if target.target_layer_ids == target_layer_ids:
        return target
    if isinstance(target, Verifier):
        return Verifier(target.weights, target.buffers.capacity_tokens, target_layer_ids, ranks=target.ranks)
    other = copy.copy(target)
    other.target_layer_ids = target_layer_ids
    return other
