"""Whole texts: plain decoding of many prompts in step, and speculative decoding of one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from dspark.decode.drafter import Draft, ModelDrafter, check_layers
from dspark.decode.round import Round, verify_block
from dspark.decode.sampling import Sampling, Uniforms, sample
from dspark.draft.model import DraftModel
from dspark.types import CacheT, Target


@dataclass(frozen=True)
class Generation:
    """A generated text (ids_T int64, new ids only, on the CPU) and the rounds that made it."""

    ids_T: torch.Tensor
    rounds: tuple[Round, ...]


@torch.no_grad()
def generate(
    target: Target[CacheT], prompts: Sequence[torch.Tensor], sampling: Sampling, uniforms: Sequence[Uniforms]
) -> list[torch.Tensor]:
    """Plain decoding: the target alone, all prompts in step, one token a pass; finished rows go on unseen.

    Each row draws from its own ``uniforms`` (see ``row_uniforms``), one a token, so its text does not depend on the
    other rows but for the rounding of the target's batched arithmetic.
    Shapes: prompts int64 [T_b], T_b >= 1. Returns: new ids of each row, int64 on the CPU, the stop token included.
    """
    if not prompts:
        return []
    cache, output = target.prefill(prompts)
    last_B = torch.tensor([len(prompt) for prompt in prompts]).cumsum(0) - 1
    hidden_BD = output.last_hidden_ND[last_B.to(output.last_hidden_ND.device)]
    texts: list[list[int]] = [[] for _ in prompts]
    is_open = [True] * len(prompts)
    one_B = torch.ones(len(prompts), dtype=torch.int64)
    while True:
        ids_B = sample(target.logits(hidden_BD), sampling, [uniform() for uniform in uniforms])
        for row, new_id in enumerate(ids_B.tolist()):
            if is_open[row]:
                texts[row].append(new_id)
                is_open[row] = new_id not in sampling.stop_token_ids and len(texts[row]) < sampling.max_new_tokens
        if not any(is_open):
            return [torch.tensor(text) for text in texts]
        hidden_BD = target.verify(ids_B[:, None], cache).last_hidden_ND
        target.commit(cache, one_B)


def speculate(
    target: Target[CacheT], draft: Draft, prompt_ids_T: torch.Tensor, sampling: Sampling, uniforms: Uniforms
) -> Generation:
    """Speculative decoding of one prompt: the same text as ``generate`` if greedy, the same distribution if not.

    Uniforms are taken in this order: one for the token after the prompt; then in each round one a drafted token (unless
    greedy), one a proposed token for its acceptance, one for the round's last token. A text of exactly max_new_tokens
    is followed by one more round, which is counted and adds nothing to the text: DeepSpec stops there.
    Shapes: prompt_ids_T int64, T >= 1; a DSpark draft is bound to the target's tables. Source: dspark.md 6.
    Raises: DraftMismatchError for a drafter that reads other layers than the target taps; as the drafter is made.
    """
    ids: list[int] = []
    rounds: list[Round] = []
    for new_ids, counts in speak(target, draft, prompt_ids_T, sampling, uniforms):
        ids += new_ids
        rounds += [] if counts is None else [counts]
    return Generation(torch.tensor(ids), tuple(rounds))


@torch.no_grad()
def speak(
    target: Target[CacheT], draft: Draft, prompt_ids_T: torch.Tensor, sampling: Sampling, uniforms: Uniforms
) -> Iterator[tuple[list[int], Round | None]]:
    """``speculate`` while it happens. Yields: the token after the prompt with None, then every round's tokens of the
    text, some or none, with its counts.
    """
    drafter = ModelDrafter(draft) if isinstance(draft, DraftModel) else draft()
    check_layers(drafter.target_layer_ids, target.target_layer_ids)
    cache, output = target.prefill([prompt_ids_T])
    ids: list[int] = sample(target.logits(output.last_hidden_ND[-1:]), sampling, [uniforms()]).tolist()
    yield ids[:], None
    committed, taps_TLD = prompt_ids_T.tolist(), output.taps_NLD
    while ids[-1] not in sampling.stop_token_ids and len(ids) <= sampling.max_new_tokens:
        drafter.extend(committed, taps_TLD)
        block = drafter.draw(ids[-1], sampling, uniforms)
        new_ids, taps_TLD, counts = verify_block(target, cache, block, sampling, uniforms)
        committed, room = [ids[-1], *new_ids[:-1]], sampling.max_new_tokens - len(ids)
        ids += new_ids
        yield new_ids[:room], replace(counts, is_cut=counts.is_cut or len(new_ids) > room)
