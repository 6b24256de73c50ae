"""A page is whole, shows what was measured and fetches nothing from elsewhere."""

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

from contenders import CONTENDERS

from dspark.eval.page import Page, Piece, render

PAGE = Page(
    title="DSpark on <nano>",
    contenders=CONTENDERS,
    learner="demo draft",
    training=({"step": 5, "loss": 2.0, "acceptance_length": 1.5}, {"step": 10, "loss": 1.0, "acceptance_length": 2.5}),
    prompt="if a < b:",
    excerpt=(Piece("x", 0, False), Piece(" = <b>", 1, True)),
    provenance={"commit": "abc", "versions": {"torch": "2"}, "gpus": []},
)


def test_the_page_is_whole_and_fetches_nothing() -> None:
    html = render(PAGE)
    assert "<script" not in html
    assert not re.search(r"(src|href)=|url\(|@import", html)
    assert "DSpark on &lt;nano&gt;" in html
    assert '<mark title="round 1: drafted"> = &lt;b&gt;</mark>' in html
    assert "if a &lt; b:" in html
    assert "<b>3.00</b>" in html
    assert "<dt>versions</dt><dd>torch 2</dd>" in html
    for part in ("viewport", "prefers-color-scheme: dark", "50% at T = 0"):
        assert part in html
    charts = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(charts) == 8
    for chart in charts:
        ElementTree.fromstring(chart)


def test_a_page_without_shipped_draft_or_training_rows_is_still_a_page() -> None:
    html = render(replace(PAGE, contenders=CONTENDERS[:3], training=()))
    assert html.count("no points were logged") == 2
    assert "shipped draft" not in html
