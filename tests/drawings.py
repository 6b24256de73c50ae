"""What the tests of pages share: the marks of a plot, by their kind."""

from matplotlib.artist import Artist
from matplotlib.figure import Figure


def marks(figure: Figure, kind: str) -> list[Artist]:
    """In the order in which they were drawn."""
    return figure.findobj(lambda artist: (artist.get_gid() or "").startswith(f"label {kind} "))


def said(figure: Figure, kind: str) -> list[str]:
    """What the marks say."""
    return [str(mark.get_gid()).removeprefix(f"label {kind} ") for mark in marks(figure, kind)]
