"""The demo's report as one page: table, charts, and a text that shows who wrote what."""

from dspark.eval.page.excerpt import Piece, pieces
from dspark.eval.page.page import Page, render

__all__ = ["Page", "Piece", "pieces", "render"]
