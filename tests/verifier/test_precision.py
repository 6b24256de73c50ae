"""Router gates and head in float32 beside working weights in bfloat16: what they are, and that it brings no harm."""

from itertools import product

import pytest
import torch
from speculating import cycle_text
from verifying import random_ids

from dspark.errors import ConfigError
from dspark.export.draft_folder import read_draft
from dspark.kernels import router
from dspark.target.config import TargetConfig, load_target_config
from dspark.target.loading import NANO_FOLDER
from dspark.verifier import (
    MtpWeights,
    Precision,
    Shard,
    Verifier,
    VerifierWeights,
    load_mtp,
    load_weights,
    random_mtp,
    random_weights,
)
from dspark.verifier.drafting import BlockDrafter, Cycle, Drafter, MtpDrafter, draft_weights
from dspark.verifier.weights import RouterWeights, allocate, tensors_of

BOTH = Precision(torch.bfloat16, frozenset({"router", "head"}))


@pytest.fixture(scope="module")
def truth() -> VerifierWeights:
    """Of nano's shape, with more digits than bfloat16 has."""
    return random_weights(load_target_config(NANO_FOLDER), Shard(), torch.float64)


def rounded(truth: VerifierWeights, precision: torch.dtype | Precision, device: torch.device) -> Verifier:
    weights = allocate(truth.config, truth.shard, precision, device)
    for tensor, exact in zip(tensors_of(weights), tensors_of(truth), strict=True):
        tensor.copy_(exact)
    return Verifier(weights, 64)


def gates(weights: VerifierWeights, mtp: MtpWeights) -> list[torch.Tensor]:
    return [layer.router.gate_XD for layer in (*weights.layers, mtp.layer) if layer.router is not None]


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.cpu().double() - exact).norm() / exact.norm())


@torch.no_grad()
def test_float32_router_and_head_say_what_the_truth_says_of_the_same_rows(
    truth: VerifierWeights, kernel_device: torch.device
) -> None:
    """Of whole texts that could not be said: what bfloat16 leaves of the rows themselves outweighs it."""
    plain, wide = (rounded(truth, precision, kernel_device) for precision in (torch.bfloat16, BOTH))
    generator = torch.Generator().manual_seed(0)
    x_NTD = torch.randn(16, 16, truth.config.hidden_size, generator=generator).bfloat16()
    exact_TV = x_NTD[0].double() @ truth.head_VD.T
    errors = [error(verifier.logits(x_NTD[0].to(kernel_device)), exact_TV) for verifier in (plain, wide)]
    assert errors[1] < 1e-6 < 1e-3 < errors[0]
    wrong = [0, 0]
    routed = [number for number, layer in enumerate(truth.layers) if layer.router is not None]
    for number, x_TD in product(routed, x_NTD):
        exact = truth.layers[number].router
        assert exact is not None
        expected_TX = chosen(x_TD.double(), exact, truth.config, torch.device("cpu"))
        for kind, verifier in enumerate((plain, wide)):
            gate = verifier.weights.layers[number].router
            assert gate is not None
            found_TX = chosen(x_TD.to(kernel_device), gate, truth.config, kernel_device)
            wrong[kind] += int((found_TX.cpu() != expected_TX).sum())
    assert wrong[1] == 0 < wrong[0], wrong


def chosen(x_TD: torch.Tensor, gate: RouterWeights, config: TargetConfig, device: torch.device) -> torch.Tensor:
    """Which experts each token goes to."""
    counters = torch.zeros(1, dtype=torch.int32, device=device)
    dispatch = router.dispatch(x_TD, gate.gate_XD, gate.bias_X, config.router_law, counters)
    is_chosen_TX = torch.zeros(len(x_TD), config.num_experts + 1, dtype=torch.bool, device=device)
    for expert, pairs_N in zip(dispatch.experts_P.tolist(), dispatch.pairs_PN.tolist(), strict=True):
        for pair in pairs_N:
            if pair >= 0:
                is_chosen_TX[pair // dispatch.weights_TJ.shape[1], expert] = True
    return is_chosen_TX


@torch.no_grad()
@pytest.mark.parametrize("names", [(), ("router",), ("head",), ("router", "head")])
def test_only_what_is_named_is_float32(names: tuple[str, ...]) -> None:
    precision = Precision(torch.bfloat16, frozenset(names))
    config = load_target_config(NANO_FOLDER)
    for weights, mtp in (
        (load_weights(NANO_FOLDER, Shard(), precision), load_mtp(NANO_FOLDER, Shard(), precision)),
        (random_weights(config, Shard(), precision), random_mtp(config, Shard(), precision)),
    ):
        assert {gate_XD.dtype for gate_XD in gates(weights, mtp)} == {precision.of("router")}
        assert weights.head_VD.dtype == precision.of("head")
        assert (weights.dtype, mtp.eh_DC.dtype) == (torch.bfloat16, torch.bfloat16)
    assert precision.of("head") == (torch.float32 if "head" in names else torch.bfloat16)


def test_a_wider_working_dtype_is_kept_and_other_names_are_refused() -> None:
    assert Precision(torch.float64, frozenset({"head"})).of("head") == torch.float64
    with pytest.raises(ConfigError, match="float32 is router and head, got 'experts', 'norm'"):
        Precision(torch.bfloat16, frozenset({"head", "norm", "experts"}))


@torch.no_grad()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["dspark", "mtp"])
def test_widening_a_checkpoint_in_bfloat16_changes_no_text(kind: str, temperature: float) -> None:
    """On the CPU, where sums of products are float32's in any case and in one order."""
    texts = []
    for precision in (torch.bfloat16, BOTH):
        verifier = Verifier.load(NANO_FOLDER, 96, (1, 2, 4, 5, 6), precision, "cpu")
        drafter: Drafter = MtpDrafter(verifier, load_mtp(NANO_FOLDER, Shard(), precision), 3)
        if kind == "dspark":
            draft = read_draft(NANO_FOLDER / "draft", (verifier.embedding_VD, verifier.head_VD))
            drafter = BlockDrafter(verifier, draft_weights(draft, Shard(), torch.bfloat16, "cpu"), 3)
        cycle = Cycle(verifier, drafter, temperature, torch.Generator().manual_seed(0))
        texts.append(cycle_text(cycle, random_ids(verifier.vocab_size, 20), 24))
    assert len(texts[0]) == 24
    assert texts[0] == texts[1]
