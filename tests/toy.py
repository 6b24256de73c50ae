"""A target made of tables, whose text has an exactly known law, drafts for it, and the test that counts follow it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from dspark.config import DraftConfig
from dspark.decode.drafter import ModelDrafter
from dspark.draft.model import DraftModel
from dspark.types import TargetOutput

SIZE, NUM_STATES = 4, 7


def chi_square_p_value(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """The chance of a deviation at least this large if the counts were drawn from probs; rare outcomes are pooled."""
    expected = probs.double() * counts.sum()
    is_rare = expected < 6
    expected = torch.cat((expected[~is_rare], expected[is_rare].sum()[None]))
    found = torch.cat((counts[~is_rare], counts[is_rare].sum()[None])).double()
    is_possible = expected > 0
    assert not found[~is_possible].any(), "an outcome of probability zero"
    statistic = ((found - expected)[is_possible] ** 2 / expected[is_possible]).sum()
    freedom = torch.tensor((int(is_possible.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))


@dataclass
class TableCache:
    """Per sequence the state after the committed ids, and the ids themselves."""

    states: list[int]
    ids: list[list[int]]
    staged: list[list[int]]


class TableTarget:
    """Next-token logits are row s of ``logits_SV``, where s is a state that each id moves on by ``step(s, id)``.

    Taps of an id at a position are token_table[layer][id] + position_table[layer][position % 8].
    """

    def __init__(
        self,
        logits_SV: torch.Tensor,
        step: Callable[[int, int], int] = lambda state, new_id: new_id,
        taps: tuple[torch.Tensor, torch.Tensor] | None = None,
        target_layer_ids: tuple[int, ...] = (),
    ) -> None:
        self.logits_SV, self.step, self.target_layer_ids = logits_SV, step, target_layer_ids
        self.vocab_size = logits_SV.shape[1]
        self.hidden_size = logits_SV.shape[0]
        self.num_layers = 8
        self.embedding_VD = self.head_VD = logits_SV.T.contiguous()
        none = torch.zeros(self.num_layers + 1, 1, 0, dtype=logits_SV.dtype)
        self.token_table, self.position_table = taps or (none, none)
        self.verified_tokens: list[int] = []
        self.commits: list[list[int]] = []

    def prefill(self, ids: Sequence[torch.Tensor]) -> tuple[TableCache, TargetOutput]:
        cache = TableCache([0] * len(ids), [[] for _ in ids], [row.tolist() for row in ids])
        output = self._read(cache)
        self.commit(cache, torch.tensor([len(row) for row in ids]))
        return cache, output

    def verify(self, ids_BT: torch.Tensor, cache: TableCache) -> TargetOutput:
        cache.staged = ids_BT.tolist()
        self.verified_tokens.append(ids_BT.shape[1])
        return self._read(cache)

    def commit(self, cache: TableCache, counts_B: torch.Tensor) -> None:
        self.commits.append(counts_B.tolist())
        for row, count in enumerate(counts_B.tolist()):
            if not 0 <= count <= len(cache.staged[row]):
                raise ValueError(f"count {count} of sequence {row}")
            for new_id in cache.staged[row][:count]:
                cache.states[row] = self.step(cache.states[row], new_id)
                cache.ids[row].append(new_id)
        cache.staged = [[] for _ in cache.ids]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.logits_SV

    def _read(self, cache: TableCache) -> TargetOutput:
        states, taps = [], []
        for state, old, new in zip(cache.states, cache.ids, cache.staged, strict=True):
            for position, new_id in enumerate(new, start=len(old)):
                state = self.step(state, new_id)
                states.append(state)
                tables = [
                    self.token_table[layer + 1][new_id % self.token_table.shape[1]]
                    + self.position_table[layer + 1][position % self.position_table.shape[1]]
                    for layer in self.target_layer_ids
                ]
                taps.append(torch.stack(tables) if tables else self.token_table[:0, 0])
        one_hot = torch.eye(self.hidden_size, dtype=self.logits_SV.dtype)
        return TargetOutput(torch.stack(taps), one_hot[states])


def toy_draft(config: dict[str, Any], seed: int, dtype: torch.dtype = torch.float32) -> DraftModel:
    shape = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4}
    widths = {"intermediate_size": 8, "max_position_embeddings": 512, "markov_rank": 4, "block_size": 3}
    draft = DraftModel(DraftConfig(**(shape | widths | config))).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return draft.eval()


def sure(draft: DraftModel, threshold: float) -> Callable[[], ModelDrafter]:
    """A draft whose blocks end before the first confidence below the threshold."""
    return partial(ModelDrafter, draft, threshold)


def move(state: int, new_id: int) -> int:
    """A recurrent state: committing one token too many or too few changes everything after it."""
    return (3 * state + new_id + 1) % NUM_STATES


def toy_pair(dtype: torch.dtype = torch.float32) -> tuple[TableTarget, DraftModel]:
    generator = torch.Generator().manual_seed(1)
    taps = torch.randn(9, SIZE, 4, generator=generator), torch.randn(9, 8, 4, generator=generator)
    logits = 1.5 * torch.randn(NUM_STATES, SIZE, generator=generator)
    tables = taps[0].to(dtype), taps[1].to(dtype)
    target = TableTarget(logits.to(dtype), move, tables, target_layer_ids=(1, 4))
    sizes = {"vocab_size": SIZE, "hidden_size": 4, "num_target_layers": 8, "target_layer_ids": (1, 4)}
    draft = toy_draft(sizes | {"mask_token_id": 0}, seed=4, dtype=dtype)
    draft.bind(*(torch.randn(SIZE, 4, generator=generator).to(dtype) for _ in range(2)))
    return target, draft
