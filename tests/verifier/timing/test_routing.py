"""A trace of routing: what it says of its windows, that the experts obey it, and that no other file passes for one."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from verifying import random_ids

from dspark.errors import ConfigError
from dspark.target.config import TargetConfig, load_target_config
from dspark.target.loading import NANO_FOLDER
from dspark.target.model import LingModel
from dspark.verifier import Step, Verifier
from dspark.verifier.timing import distinct_experts, fill, read_trace, record_step, replay


def random_trace(config: TargetConfig, num_tokens: int, num_experts: int | None = None) -> torch.Tensor:
    """Different experts for every pick, among the first ``num_experts``."""
    num_layers = sum(config.is_moe(layer) for layer in range(config.num_hidden_layers))
    shape = (num_tokens, num_layers, num_experts or config.num_experts)
    scores_NLX = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    return scores_NLX.argsort(-1)[..., : config.num_experts_per_tok].contiguous()


@torch.no_grad()
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_the_experts_of_a_window_are_those_of_the_trace(
    verifier: Verifier, target: LingModel, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    config, ids_T = target.config, random_ids(target.vocab_size, 20 + num_tokens)
    caches = [model.prefill([ids_T[:20]])[0] for model in (verifier, target)]
    free_ND = verifier.verify(ids_T[None, 20:], caches[0]).last_hidden_ND
    verifier._windows.clear()  # of a GPU: captured with the router's own
    trace_NLK = random_trace(config, 30).sort().values
    first = int(replay(verifier, trace_NLK, num_tokens)["first_token"])
    window_NLK = trace_NLK[first : first + num_tokens]
    for layer, ids_NK in zip(target.model.layers[config.first_k_dense_replace :], window_NLK.unbind(1), strict=False):
        weights_NK = torch.full(ids_NK.shape, config.routed_scaling_factor / config.num_experts_per_tok)
        forced = (ids_NK.to(free_ND.device), weights_NK.to(free_ND.device))
        monkeypatch.setattr(layer.mlp.gate, "forward", lambda x_ND, forced=forced: forced)
    ours_ND, theirs_ND = (
        model.verify(ids_T[None, 20:], cache).last_hidden_ND
        for model, cache in zip((verifier, target), caches, strict=True)
    )
    torch.testing.assert_close(ours_ND, theirs_ND, rtol=1e-4, atol=1e-4)
    assert (ours_ND - free_ND).abs().max() > 0.01
    assert num_tokens + 1 not in verifier.forced


@torch.no_grad()
def test_a_steps_stages_have_the_traces_experts_and_its_router(verifier: Verifier) -> None:
    trace_NLK = random_trace(verifier.config, 12)
    first = int(replay(verifier, trace_NLK, 4)["first_token"])
    fill(verifier, 4, 50)
    stages, _ = record_step(Step(verifier, 4))
    expected = [len(set(ids_NK.flatten().tolist())) + 1 for ids_NK in trace_NLK[first : first + 4].unbind(1)]
    assert distinct_experts(stages) == expected
    assert len(stages["Router"]) == len(expected)


@pytest.mark.parametrize(("num_tokens", "length"), [(1, 7), (3, 8), (9, 40), (5, 5)])
def test_the_experts_of_all_windows_are_counted_right(num_tokens: int, length: int) -> None:
    config = load_target_config(NANO_FOLDER)
    trace_NLK = random_trace(config, length, config.num_experts - 3)
    counts = [
        [len({*trace_NLK[first : first + num_tokens, layer].flatten().tolist()}) + 1 for layer in range(7)]
        for first in range(length - num_tokens + 1)
    ]
    every = [count for row in counts for count in row]
    verifier = SimpleNamespace(config=config, weights=SimpleNamespace(device=torch.device("cpu")), forced={})
    found = replay(verifier, trace_NLK, num_tokens)  # type: ignore[arg-type]
    assert found["mean"] == pytest.approx(sum(every) / len(every), abs=0.006)
    assert (found["least"], found["most"]) == (min(every), max(every))
    totals = [sum(row) for row in counts]
    assert totals[int(found["first_token"])] == sorted(totals)[(len(totals) - 1) // 2]
    assert [int(dispatch.num_active_1) for dispatch in verifier.forced[num_tokens]] == counts[int(found["first_token"])]


def test_uniform_routing_is_what_random_picks_come_to() -> None:
    config = load_target_config(NANO_FOLDER)
    verifier = SimpleNamespace(config=config, weights=SimpleNamespace(device=torch.device("cpu")), forced={})
    found = replay(verifier, random_trace(config, 3000), 9)  # type: ignore[arg-type]
    assert found["uniform"] == pytest.approx(found["mean"], rel=0.01)


def test_a_trace_is_read_and_every_other_file_is_refused_by_name(tmp_path: Path) -> None:
    config, path = load_target_config(NANO_FOLDER), tmp_path / "trace.safetensors"
    good_NLK = random_trace(config, 6)
    assert config.num_experts < 256
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64, torch.uint16):
        save_file({"expert_ids": good_NLK.to(dtype), "other": torch.zeros(1)}, path)
        assert torch.equal(read_trace(path, config, 6), good_NLK.sort().values)
    outside_NLK, below_NLK, twice_NLK = (good_NLK.clone() for _ in range(3))
    outside_NLK[2, 1, 0] = config.num_experts
    below_NLK[4, 0, 1] = -1
    twice_NLK[5, 6, 1] = twice_NLK[5, 6, 0]
    cases = {
        "found torch.float32": good_NLK.float(),
        "found torch.bool": good_NLK > 0,
        r"found torch.int64 \[6, 6, 4\]": good_NLK[:, 1:],
        r"found torch.int64 \[6, 7, 3\]": good_NLK[..., 1:],
        r"\[6\]": good_NLK[:, 0, 0],
        r"\[\]": torch.tensor(3),
        r"6 tokens or more.*found torch.int64 \[5, 7, 4\]": good_NLK[1:],
        "different experts.*of token 2 in MoE layer 1": outside_NLK,
        "different experts.*of token 4 in MoE layer 0": below_NLK,
        "different experts.*of token 5 in MoE layer 6": twice_NLK,
    }
    for message, ids_NLK in cases.items():
        save_file({"expert_ids": ids_NLK.contiguous()}, path)
        assert_refused(path, config, message)
    save_file({"experts": good_NLK.contiguous()}, path)
    assert_refused(path, config, "expert_ids")
    path.write_bytes(b"no header")
    assert_refused(path, config, "header")
    assert_refused(tmp_path, config, "expected integers expert_ids")
    assert_refused(tmp_path / "absent", config, "No such file")


def assert_refused(path: Path, config: TargetConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read_trace(path, config, 6)
    assert str(error.value).startswith(f"{path}: ")
    assert "\n" not in str(error.value)
