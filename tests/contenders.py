"""What the tests of reports share: four ways to decode, measured on two texts."""

from typing import NamedTuple

import torch

from dspark.decode.round import Round
from dspark.eval.measure import Measurement, summarise
from dspark.eval.timing import DecodedText

CLOCK = {"prefill": 0.1, "draft": 0.1, "verify": 0.2, "other": 0.1}


class Contender(NamedTuple):
    name: str
    measurements: tuple[Measurement, ...]


def measured(temperature: float, *lengths: int) -> Measurement:
    """Two texts of the same rounds, the second one looping."""
    rounds = tuple(Round(4, length - 1, length, index == 0, ()) for index, length in enumerate(lengths))
    ids_T = torch.arange(sum(lengths) + 1 if lengths else 7)
    texts = [DecodedText(ids_T, rounds, 0.5, False, 0.1, CLOCK), DecodedText(ids_T, rounds[:1], 0.5, True, 0.1, CLOCK)]
    return summarise("heldout", temperature, texts)


CONTENDERS = tuple(
    Contender(name, tuple(measured(temperature, *lengths) for temperature in (0.0, 1.0)))
    for name, lengths in {
        "plain decoding": (),
        "untrained draft": (1, 1, 2),
        "demo draft": (3, 2, 4),
        "shipped draft": (5, 4, 5),
    }.items()
)
