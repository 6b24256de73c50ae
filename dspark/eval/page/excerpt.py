"""A generated text cut into the pieces that draft and target wrote."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from dspark.eval.timing import DecodedText


class Piece(NamedTuple):
    """Some characters of one round: written by the draft and accepted, or by the target itself."""

    text: str
    round_index: int
    is_drafted: bool


def pieces(decoded: DecodedText, decode: Callable[[Sequence[int]], str]) -> tuple[Piece, ...]:
    """Cut a text by rounds; ``decode`` is the tokenizer's. The token after the prompt is round 0, the target's.
    Bytes of one character that several tokens share go to the piece that completes it.
    """
    ids = decoded.ids_T.tolist()
    authors = [(0, False)]
    for index, counts in enumerate(decoded.rounds, 1):
        authors += [(index, slot < counts.accepted_drafts) for slot in range(counts.acceptance_length)]
    found: list[Piece] = []
    start = 0
    for end, author in enumerate(authors[: len(ids)], 1):
        written, whole = decode(ids[:start]), decode(ids[:end])
        if end < len(ids) and (authors[end] == author or whole.endswith("\ufffd")):
            continue
        found.append(Piece(whole[len(written) :], *author))
        start = end
    return tuple(piece for piece in found if piece.text)
