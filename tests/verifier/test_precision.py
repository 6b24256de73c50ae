"""Router gates and head in float32 beside working weights in bfloat16: what they are, and that it brings no harm."""

import pytest
import torch
from verifying import random_ids

from dspark.errors import ConfigError
from dspark.export import read_draft
from dspark.target.config import load_target_config
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
from dspark.verifier.weights import allocate, tensors_of

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
def test_float32_router_and_head_bring_the_logits_no_further_from_the_truth(
    truth: VerifierWeights, kernel_device: torch.device
) -> None:
    exact = rounded(truth, torch.float64, torch.device("cpu"))
    plain, wide = (rounded(truth, precision, kernel_device) for precision in (torch.bfloat16, BOTH))
    ids_T = random_ids(exact.vocab_size, 45)
    errors = []
    for verifier in (plain, wide):
        found, expected = [], []
        for model, outputs in ((verifier, found), (exact, expected)):
            cache, output = model.prefill([ids_T[:36]])
            outputs += [model.logits(part.last_hidden_ND) for part in (output, model.verify(ids_T[None, 36:], cache))]
        errors.append([error(*pair) for pair in zip(found, expected, strict=True)])
        assert all(logits.dtype == torch.float32 for logits in found)
    assert all(theirs <= ours for ours, theirs in zip(*errors, strict=True)), errors
    hidden_TD = exact.prefill([ids_T])[1].last_hidden_ND.bfloat16()
    expected_TV = exact.logits(hidden_TD.double())
    head_errors = [error(verifier.logits(hidden_TD.to(kernel_device)), expected_TV) for verifier in (plain, wide)]
    assert head_errors[0] > 1e-4
    assert head_errors[1] < 1e-6


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
        texts.append(list(cycle.generate(random_ids(verifier.vocab_size, 20), 24)))
    assert len(texts[0]) == 24
    assert texts[0] == texts[1]
