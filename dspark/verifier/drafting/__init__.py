"""Speculative decoding on the device: a drafter beside the verifier, and the cycle of both as one captured graph.

A cycle is draft, verify, accept, commit, update. Whatever drafts is a ``Drafter``: ``draft`` puts tokens behind the
anchor into the verifier's ids_T, ``update`` takes in what the target said about the tokens that were committed.
``BlockDrafter`` is a DSpark draft, ``MtpDrafter`` the target's own prediction layer. With a draft's folder::

    taps = read_layout(folder)[0].target_layer_ids  # this and read_draft: dspark.export
    verifier = Verifier.load(target_folder, 4096, taps)
    draft = read_draft(folder, (verifier.embedding_VD, verifier.head_VD), device="cuda")
    weights = draft_weights(draft, Shard(), verifier.weights.dtype, "cuda")
    for new_ids in Cycle(verifier, BlockDrafter(verifier, weights, 8)).rounds(prompt_ids_T):  # without end
        ...
"""

from dspark.verifier.drafting.block import BlockDrafter
from dspark.verifier.drafting.cycle import Cycle, CycleOutput
from dspark.verifier.drafting.drafter import Drafter, Drafts, NoDrafter, Sampler
from dspark.verifier.drafting.mtp import MtpDrafter
from dspark.verifier.drafting.weights import DraftWeights, draft_weights, random_draft

__all__ = ["BlockDrafter", "Cycle", "CycleOutput", "DraftWeights", "Drafter", "Drafts", "MtpDrafter"]
__all__ += ["NoDrafter", "Sampler", "draft_weights", "random_draft"]
