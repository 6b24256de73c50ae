"""Pages: the demo's and that of evaluations, of the same tables, charts, and texts that show who wrote what."""

from dspark.eval.page.excerpt import Piece, pieces
from dspark.eval.page.folder import Evaluation, read_evaluation
from dspark.eval.page.page import Page, render
from dspark.eval.page.pictures import draw, has_font
from dspark.eval.page.report import compare_evaluations, render_report, typical_text

__all__ = [
    "Evaluation",
    "Page",
    "Piece",
    "compare_evaluations",
    "draw",
    "has_font",
    "pieces",
    "read_evaluation",
    "render",
    "render_report",
    "typical_text",
]
