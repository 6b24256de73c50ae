"""The speculators package opens our export for it, and its own forward pass says what our draft says.

The package pins other versions of what we use, so no environment of ours has it: ``.ci/run`` puts it into a folder of
its own and runs these tests with that folder on the path.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from exported import FIELDS, SMALL, make_draft, tables
from safetensors.torch import save_file
from transformers import Qwen3Config

from dspark.export.draft_folder import write_draft

pytest.importorskip("speculators", reason="the speculators package is installed by .ci/run alone, in a folder apart")

ANCHORS = [4, 9, 13]


def write_verifier(folder: Path, tables: tuple[torch.Tensor, torch.Tensor]) -> None:
    """What that package reads of a target: its two tables and its final norm."""
    folder.mkdir()
    shape = {"vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 8}
    Qwen3Config(**shape).save_pretrained(folder)
    weights = {"model.embed_tokens.weight": tables[0], "lm_head.weight": tables[1], "model.norm.weight": torch.ones(16)}
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"markov_head_type": "gated"},
        {"markov_head_type": "rnn"},
        {"sample_from_anchor": False},
        {"confidence_head_with_markov": False, "num_key_value_heads": 4},
    ],
    ids=str,
)
def test_its_own_forward_gives_our_logits_and_confidences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    from speculators.models.dflash import core as dflash
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig, core

    draft = make_draft(SMALL.model_copy(update=changes))
    write_verifier(tmp_path / "target", tables(SMALL))
    made = {"target": str(tmp_path / "target")}
    write_draft(draft, tmp_path / "draft", FIELDS, runtime="speculators", provenance=made)
    config = DSparkSpeculatorConfig.from_pretrained(tmp_path / "draft")
    assert [each - 1 for each in config.aux_hidden_state_layer_ids] == [1, 4, 6]
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = DSparkDraftModel.from_pretrained(tmp_path / "draft", config=config, dtype=torch.float32)
    theirs.load_verifier_weights()
    generator = torch.Generator().manual_seed(3)
    ids_T, taps_TLD = torch.randint(60, (24,), generator=generator), torch.randn(24, 3, 16, generator=generator)
    said: dict[str, torch.Tensor] = {}

    def keep(logits: torch.Tensor, targets: torch.Tensor, confidence: torch.Tensor, *_: Any, **__: Any) -> Any:
        said.update(logits=logits, confidence=confidence)
        return torch.zeros(()), {}

    monkeypatch.setattr(core, "compute_metrics", keep)
    chosen = torch.tensor(ANCHORS)
    monkeypatch.setattr(dflash, "select_anchors", lambda *_: (chosen, torch.ones(len(ANCHORS), dtype=torch.bool)))
    row = (taps_TLD.flatten(1)[None], ids_T[None], torch.ones(1, 24), torch.zeros(1, 24, 16), torch.zeros(1, 24).long())
    theirs.eval()(*row, max_anchors=len(ANCHORS))
    ours = draft(ids_T, torch.arange(24), taps_TLD, torch.zeros(3).long(), chosen)
    logits_AKV = draft.base_logits(ours.hidden_AKD) + ours.mixed_AKR @ ours.markov_VR.T
    shape, num_slots = (len(ANCHORS), config.block_size), draft.config.block_size
    theirs_AKV = said["logits"].view(*shape, -1)[:, -num_slots:]
    torch.testing.assert_close(theirs_AKV, logits_AKV, atol=2e-4, rtol=2e-4)
    confidence_AK = said["confidence"].view(shape)[:, -num_slots:]
    torch.testing.assert_close(confidence_AK, ours.confidence_logits_AK, atol=2e-4, rtol=2e-4)
