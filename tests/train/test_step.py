"""One step: independent of how its sequences are split, clipped, and never taken on numbers that are not finite."""

from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from torch import Tensor
from training_run import make_learner, make_sequences, read_batch, read_window, ready, take_step

from dspark.draft import backbone
from dspark.errors import TrainingError
from dspark.train import objective as room
from dspark.train.batches import Batch, Share, copied_ahead
from dspark.train.objective import denominators
from dspark.train.step import Learner, make_graphs, micro_step


def make_window(learner: Learner) -> list[Batch]:
    train, sequences = learner.run.train, make_sequences()
    share = Share(train.batch_size, train.accumulation_steps, 0, 1)
    return read_window(sequences, learner.run, 0, share, learner.accelerator.device)


def gradients(learner: Learner) -> Tensor:
    """The clipped gradient of the first step, from AdamW's first moment."""
    rate = 1 - learner.run.train.betas[0]
    moments = [learner.optimizer.state[parameter]["exp_avg"] / rate for parameter in learner.draft.parameters()]
    return torch.cat([moment.flatten() for moment in moments])


def test_gradient_and_loss_do_not_depend_on_how_a_step_is_split(tmp_path: Path) -> None:
    found = []
    for batch_size, accumulation_steps in ((4, 1), (1, 4), (2, 2)):
        learner = make_learner(
            tmp_path, batch_size=batch_size, accumulation_steps=accumulation_steps, max_grad_norm=1e6
        )
        metrics = take_step(learner, make_window(learner), step=2)
        loss, length = (metrics[name][0] / metrics[name][1] for name in ("loss", "expected_acceptance_ratio"))
        found.append((gradients(learner), loss, length))
    for other in found[1:]:
        for value, expected in zip(other, found[0], strict=True):
            torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)
    assert found[0][0].abs().max() > 0.1


def test_the_step_of_the_whole_is_not_the_mean_of_the_steps_of_its_parts(tmp_path: Path) -> None:
    """The test above can fail: these sequences weigh differently, so a loss normalised per micro-step differs."""
    learner = make_learner(tmp_path)
    whole = take_step(learner, make_window(learner), step=2)["loss"]
    parts = [take_step(make_learner(tmp_path), [batch], step=2)["loss"] for batch in make_window(learner)]
    mean = sum(float(top / bottom) for top, bottom in parts) / len(parts)
    assert abs(mean - float(whole[0] / whole[1])) > 1e-3


def test_the_gradient_is_clipped_and_its_norm_before_that_is_logged(tmp_path: Path) -> None:
    learner = make_learner(tmp_path, max_grad_norm=0.01)
    norm, share = take_step(learner, make_window(learner), step=0)["gradient_norm"]
    assert norm / share > 0.05
    torch.testing.assert_close(gradients(learner).norm(), torch.tensor(0.01), rtol=1e-3, atol=0)


def test_a_step_changes_every_parameter_and_no_table(tmp_path: Path) -> None:
    learner = make_learner(tmp_path)
    before = {name: tensor.clone() for name, tensor in learner.draft.state_dict().items()}
    head_VD = learner.draft.head_VD.clone()
    take_step(learner, make_window(learner), step=2)
    assert [name for name, tensor in learner.draft.state_dict().items() if torch.equal(tensor, before[name])] == []
    assert torch.equal(learner.draft.head_VD, head_VD)


def test_a_confidence_head_without_weight_gets_a_gradient_of_zero(tmp_path: Path) -> None:
    """Data parallel training waits for the gradient of every parameter."""
    learner = make_learner(tmp_path)
    objective = learner.run.objective.model_copy(update={"confidence": 0.0})
    learner = replace(learner, run=learner.run.model_copy(update={"objective": objective}))
    take_step(learner, make_window(learner), step=0)
    for parameter in learner.draft.confidence_head.parameters():
        assert not learner.optimizer.state[parameter]["exp_avg"].any()


def unmoved(learner: Learner, window: list[Batch], message: str) -> None:
    before = {name: tensor.clone() for name, tensor in learner.draft.state_dict().items()}
    with pytest.raises(TrainingError, match=message):
        take_step(learner, window, step=7)
    assert all(torch.equal(tensor, before[name]) for name, tensor in learner.draft.state_dict().items())
    assert not learner.optimizer.state


def test_a_loss_that_is_not_finite_stops_before_the_optimizer_moves_and_names_the_sequence(tmp_path: Path) -> None:
    learner = make_learner(tmp_path)
    window = make_window(learner)
    window[2].last_hidden_TD[:] = float("nan")
    unmoved(learner, window, rf"step 7: the loss is not finite.*\[{window[2].indices[0]}\]")


def test_a_gradient_that_is_not_finite_stops_before_the_optimizer_moves(tmp_path: Path) -> None:
    learner = make_learner(tmp_path)
    window = make_window(learner)
    learner.draft.fc.weight.register_hook(lambda gradient: gradient * float("inf"))
    indices = sorted(batch.indices[0] for batch in window)
    unmoved(learner, window, rf"step 7: the gradient is not finite.*{indices}".replace("[", r"\[").replace("]", r"\]"))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_average_moves_with_the_step_and_stays_when_the_step_is_refused(tmp_path: Path, optimizer: str) -> None:
    learner = make_learner(tmp_path, ema_decay=0.5, optimizer=optimizer)
    parameters, averages = list(learner.draft.parameters()), []
    for step in range(2):
        take_step(learner, make_window(learner), step)
        averages.append([learner.optimizer.state[parameter]["ema"].clone() for parameter in parameters])
    assert not torch.equal(averages[0][0], averages[1][0])
    learner.draft.fc.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(TrainingError, match="the gradient is not finite"):
        take_step(learner, make_window(learner), step=2)
    for parameter, average in zip(parameters, averages[1], strict=True):
        assert torch.equal(learner.optimizer.state[parameter]["ema"], average)


def test_no_average_is_kept_unless_the_run_asks_for_it(tmp_path: Path) -> None:
    learner = make_learner(tmp_path)
    take_step(learner, make_window(learner), step=0)
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in learner.optimizer.state.values())


def test_layers_computed_again_give_the_same_gradient_to_the_bit(tmp_path: Path) -> None:
    found, passes = [], []
    for is_on in (False, True):
        learner, calls = make_learner(tmp_path, activation_checkpointing=is_on), []
        learner.draft.layers[0].register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        take_step(learner, make_window(learner), step=2)
        found.append(gradients(learner))
        passes.append(len(calls))
    assert torch.equal(found[0], found[1])
    assert passes == [4, 8]


def test_a_step_without_a_valid_slot_learns_nothing(tmp_path: Path) -> None:
    learner = make_learner(tmp_path)
    sequences = make_sequences()
    for sequence in sequences:
        sequence.loss_mask_T[:] = False
    window = [read_batch(sequences, [(0, index)], learner.run) for index in range(4)]
    assert float(take_step(learner, window, step=2)["loss"][0]) == 0.0
    assert not gradients(learner).any()


def test_under_autocast_the_objective_runs_in_it_too_and_gradients_stay_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, seen = [], []
    judge = room.judge

    def spy(*inputs: Any) -> Any:
        seen.append(torch.is_autocast_enabled("cpu"))
        return judge(*inputs)

    monkeypatch.setattr(room, "judge", spy)
    for precision in ("no", "bf16"):
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
        learner = make_learner(tmp_path, max_grad_norm=1e6)
        take_step(learner, make_window(learner), step=2)
        found.append(gradients(learner))
    AcceleratorState._reset_state(reset_partial_state=True)
    assert set(seen[: len(seen) // 2]) == {False}
    assert set(seen[len(seen) // 2 :]) == {True}
    assert 1e-4 < float((found[1] - found[0]).norm() / found[0].norm()) < 5e-2


@pytest.mark.parametrize("num_tokens", [33, 24, 256])  # 24: as many as the slots of its anchors
def test_the_graphs_made_before_the_first_step_serve_every_batch_and_leave_the_learner_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    torch.compiler.reset()
    graphs: list[Any] = []
    whole = partial(torch.compile, fullgraph=True, backend=lambda graph, _: graphs.append(graph) or graph)
    monkeypatch.setattr(torch, "compile", lambda run, dynamic, options: whole(run, dynamic=dynamic))
    monkeypatch.setattr(room, "fused", lru_cache(lambda part, _: torch.compile(part, dynamic=True, options={})))
    # On a CPU attention walks over documents, which no graph can hold; on a GPU it is one operation.
    monkeypatch.setattr(backbone, "anchor_attention", lambda q, ck, cv, k, v, *_: q + (ck * cv).mean() + (k * v).mean())
    learner = make_learner(tmp_path)
    learner.draft.compile_layers()
    limits = learner.run.record.model_copy(update={"max_tokens": num_tokens})
    learner = replace(learner, run=learner.run.model_copy(update={"record": limits}))
    before = {name: tensor.clone() for name, tensor in learner.draft.state_dict().items()}
    make_graphs(learner)
    made = len(graphs)
    assert made == 5  # the first layer, whose input has no gradient, the others, confidence; weights, terms
    assert all(torch.equal(before[name], tensor) for name, tensor in learner.draft.state_dict().items())
    assert all(parameter.grad is None for parameter in learner.draft.parameters())
    sequences, share = make_sequences(), Share(batch_size=1, accumulation_steps=4, rank=0, world_size=1)
    for loss_mask_T in (sequences[0].loss_mask_T, sequences[2].loss_mask_T):
        loss_mask_T[:] = torch.arange(len(loss_mask_T)) == 9  # nothing to learn
    sequences[4].loss_mask_T[:] = torch.arange(len(sequences[4].loss_mask_T)) > len(sequences[4].loss_mask_T) - 3
    for step in range(4):
        take_step(learner, read_window(sequences, learner.run, 4 * step, share), step)
    assert len(graphs) == made


@pytest.mark.skipif(not torch.cuda.is_available(), reason="layers are compiled on a GPU alone")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_on_a_gpu_too_no_step_needs_another_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    torch.compiler.reset()
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", precision)
    learner = make_learner(tmp_path, "cuda")
    make_graphs(learner)
    share = Share(batch_size=1, accumulation_steps=4, rank=0, world_size=1)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(4):
            window = read_window(make_sequences(), learner.run, 4 * step, share, learner.accelerator.device)
            take_step(learner, window, step)
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="only a GPU works behind its host")
def test_a_micro_step_is_handed_to_the_gpu_without_a_wait(tmp_path: Path) -> None:
    learner = make_learner(tmp_path, "cuda")
    take_step(learner, make_window(learner), step=0)  # what is made once may wait
    window, section = make_window(learner), learner.run.objective
    pooled = denominators(window[0].slots, section.decay_positions).to(learner.accelerator.device)
    torch.cuda.set_sync_debug_mode("error")
    try:
        feed = copied_ahead(map(ready, window), learner.accelerator.device)
        for _ in window:
            micro_step(learner, next(feed), pooled, step=2, is_last=False)
        with pytest.raises(RuntimeError, match="synchroniz"):
            pooled.tolist()
    finally:
        torch.cuda.set_sync_debug_mode("default")
