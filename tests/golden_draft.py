"""The golden draft cases as models and tensors, for every room that must agree with them."""

from dataclasses import dataclass
from typing import Any

import torch
from agreeing import Teacher, logits_of
from torch import Tensor

from dspark.config import DraftConfig
from dspark.draft.anchors import BlockTargets, block_targets
from dspark.draft.model import DraftModel, DraftOutput

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

    @property
    def starts_A(self) -> Tensor:
        """Where the sequences of all blocks begin when they are packed."""
        num_sequences, num_tokens = self.ids_BT.shape
        return (num_tokens * torch.arange(num_sequences)).repeat_interleave(self.anchors_BA.shape[1])

    @property
    def anchors_A(self) -> Tensor:
        """Anchors of all blocks in the packed row; a padding block stands where its sequence begins."""
        return self.starts_A + (self.anchors_BA * self.keep_BA).flatten()

    def run(self, taps_BTLD: Tensor) -> DraftOutput:
        """The training pass on other taps."""
        ids_T, positions_BT = self.ids_BT.flatten(), torch.arange(self.ids_BT.shape[1]).expand_as(self.ids_BT)
        row = (ids_T, positions_BT.flatten(), taps_BTLD.flatten(0, 1), self.starts_A, self.anchors_A)
        output: DraftOutput = self.draft(*row)
        return output

    def forward(self) -> DraftOutput:
        """The training pass: both sequences in one row, a block for every place of the file's grid."""
        return self.run(self.taps())

    def alone(self, b: int) -> tuple[DraftOutput, Teacher]:
        """The training pass of one sequence in a row of its own, and what teaches it."""
        anchors_A = self.anchors_BA[b] * self.keep_BA[b]
        row = (self.ids_BT[b], torch.arange(self.ids_BT.shape[1]), self.taps()[b], torch.zeros_like(anchors_A))
        return self.draft(*row, anchors_A), Teacher(self.teacher().head_VD, self.last_hidden_BTD[b], anchors_A)

    def on_grid(self, x_AK: Tensor) -> Tensor:
        """What is known of packed blocks in the file's order: [B, A, K, ...]."""
        return x_AK.view(*self.anchors_BA.shape, *x_AK.shape[1:])

    def targets(self, shift: int = 0) -> BlockTargets:
        """Labels and validity of all blocks; those of the positions ``shift`` later are a mistake."""
        block_size, found = self.draft.config.block_size, []
        for ids_T, mask_T, anchors_A in zip(self.ids_BT, self.loss_mask_BT, self.anchors_BA, strict=True):
            found.append(block_targets(ids_T, mask_T, anchors_A + shift, block_size))
        valid_AK = torch.cat([each.valid_AK for each in found]) & self.keep_BA.flatten()[:, None]
        return BlockTargets(torch.cat([each.label_ids_AK for each in found]), valid_AK)

    def logits(self) -> Tensor:
        """draft_logits_BAKV of the training pass."""
        return self.on_grid(logits_of(self.draft, self.forward()))

    def teacher(self, last_hidden_BTD: Tensor | None = None) -> Teacher:
        """What teaches, or what would with other states."""
        assert self.draft.head_VD is not None
        states_BTD = self.last_hidden_BTD if last_hidden_BTD is None else last_hidden_BTD
        return Teacher(self.draft.head_VD, states_BTD.flatten(0, 1), self.anchors_A)


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
        states_BTLD=exact(inputs["target_hidden_states"], dtype).permute(1, 2, 0, 3),
        last_hidden_BTD=exact(inputs["target_last_hidden_post_norm"], dtype),
        pre_norm_BTD=exact(inputs["target_last_hidden_pre_norm"], dtype),
        anchors_BA=torch.tensor(inputs["anchors"]),
        keep_BA=torch.tensor(inputs["block_keep"]).bool(),
        valid_BAK=torch.tensor(golden["shared_expected"]["eval_mask"]).bool(),
        expected=case,
        shared=golden["shared_expected"],
    )
