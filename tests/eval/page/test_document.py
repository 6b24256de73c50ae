"""A page's skeleton: what is missing is said, runs stand side by side, names are escaped, pictures have file names."""

import re

from dspark.eval.page.charts import Series, bar_chart
from dspark.eval.page.document import Figure, Part, Section, document, pictures, table

CHART = bar_chart([Series("a", ((0, 0.5),), 0)], 1, "slot", "share")
EMPTY = bar_chart([], 0, "slot", "share")
LAST = Section("Where this comes from", (Part(html="<p>here</p>"),))


def test_a_section_that_no_run_can_show_becomes_a_sentence() -> None:
    costs = Section("Costs <ms>", (Part(missing="no times"), Part(missing="no times")))
    half = Section("Confidence", (Part((Figure("T = 0", CHART),)), Part(missing="no head")))
    html = document("x", "", [half, costs, LAST], ["first", "second"])
    assert re.findall(r"<h2>(.*?)</h2>", html) == ["Confidence", "Left out", "Where this comes from"]
    assert "<li>Costs &lt;ms&gt;: no times.</li>" in html
    assert '<div class="run"><h3>second</h3><p class="missing">No head.</p></div>' in html
    assert "Left out" not in document("x", "", [LAST])


def test_pictures_have_names_of_their_own_that_are_good_for_files() -> None:
    figures = (Figure("../T = 0", CHART), Figure("./T = 0", CHART), Figure("T = 1", EMPTY), Figure("x" * 999, CHART))
    found = pictures([Section("Where a round ends", (Part(figures),)), LAST])
    names = list(found)
    assert names == ["where-a-round-ends-t-0", "where-a-round-ends-t-0-2", f"where-a-round-ends-{'x' * 80}"]
    runs = pictures([Section("Ends", (Part((Figure("a", CHART),)), Part()))], ["one", "two"])
    assert list(runs) == ["ends-one-a"]


def test_a_table_has_its_rows_below_their_head() -> None:
    html = table("<task>", ["length"], {"T = 0": [("<draft>", 1, ["<b>2</b>"]), ("plain", None, ["1"])]})
    assert "<caption>&lt;task&gt;</caption>" in html
    assert '<th scope="row"><i class="c1"></i>&lt;draft&gt;</th><td><b>2</b></td>' in html
    assert '<th scope="row"><i></i>plain</th><td>1</td>' in html
    assert 'colspan="2" scope="rowgroup">T = 0<' in html
