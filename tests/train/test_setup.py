"""A note where the text cannot give an unbiased acceptance length; the refusals are tested through the door."""

from pathlib import Path

import pytest
import torch
from tiny import write_tiny_ling
from training_run import make_run, make_sequences, write_record

from dspark.config import ObjectiveSection
from dspark.record.format import read_manifest
from dspark.train.setup import average_note, bias_note, fresh_draft


@pytest.mark.parametrize(
    ("text", "objective", "expected"),
    [
        ({}, {}, ""),
        ({"temperatures": (0.7,)}, {}, "at temperature 0.7"),
        ({"temperatures": (1.0, 0.7)}, {}, "at temperature 1, 0.7"),
        ({"answers": "given", "temperatures": ()}, {}, "by somebody else"),
        ({"temperatures": (0.7,)}, {"acceptance_form": "teacher_forced"}, ""),
        ({"temperatures": (0.7,)}, {"acceptance_length": 0.0}, ""),
    ],
)
def test_text_that_the_target_did_not_draw_at_temperature_1_is_noted(
    tmp_path: Path, text: dict[str, object], objective: dict[str, object], expected: str
) -> None:
    write_record(tmp_path / "record", write_tiny_ling(tmp_path / "target"), make_sequences())
    manifest = read_manifest(tmp_path / "record").model_copy(update=text)
    note = bias_note(manifest, ObjectiveSection(**objective))
    assert expected in note
    assert bool(expected) == bool(note)


def test_a_draft_that_is_an_average_is_announced(tmp_path: Path) -> None:
    assert average_note(make_run(tmp_path).train) == ""
    assert "the draft written is the moving average of decay 0.99" in average_note(
        make_run(tmp_path, ema_decay=0.99).train
    )


def test_a_fresh_draft_is_the_seeds(tmp_path: Path) -> None:
    config = make_run(tmp_path).draft
    one, same, other = (fresh_draft(config, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(tensor, same[name]) for name, tensor in one.items())
    assert not torch.equal(one["fc.weight"], other["fc.weight"])
