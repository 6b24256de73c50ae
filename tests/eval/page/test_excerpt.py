"""An excerpt says who wrote which characters."""

import torch

from dspark.decode.round import Round
from dspark.eval.page.excerpt import Piece, pieces
from dspark.eval.timing import DecodedText


def text(num_tokens: int, *lengths: int) -> DecodedText:
    rounds = tuple(Round(5, length - 1, length, False, ()) for length in lengths)
    return DecodedText(torch.arange(num_tokens), rounds, 2.0, False, 0.5, {"prefill": 2.0})


def test_an_excerpt_says_who_wrote_which_characters() -> None:
    said = ["a", "b", "c", "d", "e", "f"]
    decoded = text(6, 3, 2)
    assert pieces(decoded, lambda ids: "".join(said[i] for i in ids)) == (
        Piece("a", 0, False),
        Piece("bc", 1, True),
        Piece("d", 1, False),
        Piece("e", 2, True),
        Piece("f", 2, False),
    )


def test_bytes_of_one_character_go_to_the_piece_that_completes_it() -> None:
    bytes_of = [b"x", b"\xc3", b"\xa9", b"y"]
    decoded = text(4, 1, 2)
    cut = pieces(decoded, lambda ids: b"".join(bytes_of[i] for i in ids).decode(errors="replace"))
    assert "".join(piece.text for piece in cut) == "xéy"
    assert cut == (Piece("x", 0, False), Piece("é", 2, True), Piece("y", 2, False))
