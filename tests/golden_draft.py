"""The golden draft cases as models and tensors, for every room that must agree with them."""

from dataclasses import dataclass
from typing import Any

import torch
from agreeing import logits_of
from torch import Tensor

from dspark.config import DraftConfig
from dspark.draft.anchors import BlockTargets, block_targets
from dspark.draft.model import DraftModel, DraftOutput
from dspark.train.objective import Teacher

CASES = ("mha_vanilla", "gqa_vanilla", "mha_gated", "mha_rnn")
DTYPES = (torch.float64, torch.float32)
LOSSES = {"cross_entropy": 0.1, "forward_kl": 0.0, "total_variation": 0.9, "confidence": 1.0, "acceptance_length": 0.0}
"""DeepSpec's weights."""


def exact(entry: dict[str, Any], dtype: torch.dtype) -> Tensor:
    """An integer tensor of the golden file."""
    return (torch.tensor(entry["int"], dtype=torch.float64) / entry["den"]).reshape(entry["shape"]).to(dtype)


def close(found: Tensor, expected: Any, atol_float32: float = 5e-5) -> None:
    """Compare at the golden file's tolerance for the dtype of ``found``."""
    rtol, atol = (1e-7, 1e-9) if found.dtype == torch.float64 else (0.0, atol_float32)
    expected = torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(found.detach().double(), expected, rtol=rtol, atol=atol)


@dataclass
class GoldenCase:
    """One case: a draft with its weights and tables, the batch, and the numbers to find."""

    draft: DraftModel
    ids_BT: Tensor
    loss_mask_BT: Tensor
    lengths_B: Tensor
    states_BTLD: Tensor
    """All layers of the target, embedding output first: tap i is entry i + 1."""
    last_hidden_BTD: Tensor
    pre_norm_BTD: Tensor
    anchors_BA: Tensor
    keep_BA: Tensor
    valid_BAK: Tensor
    """As the golden file has it."""
    expected: dict[str, Any]
    shared: dict[str, Any]

    def taps(self, shift: int = 1) -> Tensor:
        """taps_BTLD of the draft's layers."""
        return self.states_BTLD[:, :, [i + shift for i in self.draft.config.target_layer_ids]]

    def forward(self) -> DraftOutput:
        """The training pass."""
        output: DraftOutput = self.draft(self.ids_BT, self.taps(), self.anchors_BA, self.keep_BA)
        return output

    def targets(self) -> BlockTargets:
        """Labels and validity."""
        return block_targets(
            self.ids_BT, self.loss_mask_BT, self.lengths_B, self.anchors_BA, self.keep_BA, self.draft.config.block_size
        )

    def logits(self) -> Tensor:
        """draft_logits_BAKV of the training pass."""
        return logits_of(self.draft, self.forward())

    def teacher(self, last_hidden_BTD: Tensor | None = None) -> Teacher:
        """What teaches, or what would with other states."""
        assert self.draft.head_VD is not None
        states_BTD = self.last_hidden_BTD if last_hidden_BTD is None else last_hidden_BTD
        return Teacher(self.draft.head_VD, states_BTD, self.anchors_BA)


def golden_case(golden: dict[str, Any], name: str, dtype: torch.dtype) -> GoldenCase:
    """Build a case of the golden file in a dtype."""
    case, inputs = golden["cases"][name], golden["shared_inputs"]
    fields = {k: v for k, v in {**golden["config"], **case["config_changes"]}.items() if k != "num_anchors"}
    draft = DraftModel(DraftConfig(max_position_embeddings=4096, **fields)).to(dtype)
    weights = {k: exact(v, dtype) for k, v in {**golden["weights"], **case["extra_weights"]}.items()}
    draft.bind(weights.pop("embed_tokens.weight"), weights.pop("lm_head.weight"))
    draft.load_state_dict(weights)
    ids_BT = torch.tensor(inputs["input_ids"])
    return GoldenCase(
        draft=draft,
        ids_BT=ids_BT,
        loss_mask_BT=torch.tensor(inputs["loss_mask"]).bool(),
        lengths_B=torch.full((len(ids_BT),), ids_BT.shape[1]),
        states_BTLD=exact(inputs["target_hidden_states"], dtype).permute(1, 2, 0, 3),
        last_hidden_BTD=exact(inputs["target_last_hidden_post_norm"], dtype),
        pre_norm_BTD=exact(inputs["target_last_hidden_pre_norm"], dtype),
        anchors_BA=torch.tensor(inputs["anchors"]),
        keep_BA=torch.tensor(inputs["block_keep"]).bool(),
        valid_BAK=torch.tensor(golden["shared_expected"]["eval_mask"]).bool(),
        expected=case,
        shared=golden["shared_expected"],
    )
