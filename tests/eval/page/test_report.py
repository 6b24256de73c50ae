"""The page of evaluations: several tasks and their mean, long prompts, the answer that is shown, differences."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drawings import marks, said

from dspark.decode.round import Round
from dspark.eval.confidence import Bin, Calibration, ConfidenceStatistics
from dspark.eval.evaluation import Evaluation
from dspark.eval.measure import Difference, GreedyEquality, summarise
from dspark.eval.page.report import render_report, typical_text
from dspark.eval.records import TextKey
from dspark.eval.report import EvalReport, Pairing
from dspark.eval.statistics import PairedComparison, TeacherForcedStatistics
from dspark.eval.timing import DecodedText


@pytest.fixture(autouse=True)
def _undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of plots only what they hold is looked at."""
    monkeypatch.setattr("dspark.eval.page.plots.svg", lambda figure: "")


TASKS = {"a": (2, 4), "b": (3, 5), "long:64": (1, 1), "made": (9, 9)}


def text(length: int, num_rounds: int = 3, is_looping: bool = False) -> DecodedText:
    rounds = (Round(9, length - 1, length, False, ()),) * num_rounds
    return DecodedText(torch.arange(1 + length * num_rounds), rounds, 1.0, is_looping, 0.5, {"prefill": 1.0})


def evaluation(*tasks: str, looping: tuple[int, ...] = ()) -> Evaluation:
    """Two prompts of every task, whose rounds commit what ``TASKS`` says; of every task the texts that loop."""
    texts = {
        TextKey(t, 0.0, "draft", index): text(length, is_looping=index in looping)
        for t in tasks
        for index, length in enumerate(TASKS[t])
    }
    measured = tuple(summarise(t, 0.0, [found for key, found in texts.items() if key.task == t]) for t in tasks)
    settings = {"prompts": {t: {"is_synthetic": t in {"made", "long:64"}} for t in tasks}}
    report = EvalReport({"name": "target"}, {"name": "<draft>"}, settings, {"commit": "abc"}, measured)
    return Evaluation(Path("run"), report, texts)


def headline(shown: Evaluation) -> str:
    header = re.search(r"<header>.*</header>", render_report([shown], ["no words"], False)[0], re.DOTALL)
    assert header
    return re.sub(r"\n *", "", header[0])


def dots(pictures: dict[str, Any], name: str) -> list[str]:
    """What the dots of a plot say."""
    return said(pictures[name].args[0], "dot")


def test_the_headline_is_a_task_with_its_interval_or_the_mean_over_real_tasks() -> None:
    one = headline(evaluation("a", "made"))
    assert (
        "With &lt;draft&gt;, a pass of target yields 3.00 tokens at T\u00a0=\u00a00, instead of 1 "
        "(2 prompts of a, none of 2 texts ends in a loop)" in one
    )
    assert "<b>3.00</b>" in one
    assert "95 %: 2.00 - 4.00" in one
    several = headline(evaluation("a", "b", "made"))
    assert "yields 3.50 tokens at T\u00a0=\u00a00, instead of 1 (mean over 2 tasks, " in several
    assert "95 %" not in several
    assert "yields 9.00 tokens" in headline(evaluation("made"))


def test_texts_that_loop_are_counted_and_left_out_of_the_headline() -> None:
    one = headline(evaluation("a", looping=(1,)))
    assert "yields 2.00 tokens" in one
    assert "without the 1 of 2 texts that end in a loop" in one
    assert "95 %" not in one, "that interval counts them"
    several = evaluation("a", "b", "made", looping=(1,))
    assert "yields 2.50 tokens" in headline(several)
    assert "without the 2 of 4 texts that end in a loop" in headline(several)
    html, _ = render_report([several], ["no words"], False)
    assert "<i></i>draft</th><td>2.50</td>" in html
    assert "<td><b>1 of 2</b></td><td>3.00</td>" in html, "of task b, in the checks"
    nothing = headline(evaluation("a", looping=(0, 1)))
    assert "yields nothing that counts" in nothing
    assert "<b>" not in nothing


def test_every_task_has_a_table_and_real_ones_a_mean() -> None:
    html, _ = render_report([evaluation("a", "b", "made")], ["no words"], False)
    result = html[html.index("<h2>Result") : html.index("<h2>Tokens")]
    captions = re.findall("<caption>(.*?)</caption>", result)
    mean = "Mean over tasks, synthetic ones and texts that loop left out"
    assert captions == ["a", "b", "made (synthetic)", mean]
    assert "<i></i>draft</th><td>3.50</td>" in result
    assert "Mean over tasks" not in render_report([evaluation("a", "made")], ["no words"], False)[0]


def test_buckets_are_of_prompts_where_tasks_say_how_long_they_are() -> None:
    _, pictures = render_report([evaluation("a", "long:64")], ["no words"], False)
    assert [name for name in pictures if "length-of" in name] == ["along-the-answer-by-length-of-the-prompt-t-0"]
    assert dots(pictures, "along-the-answer-by-length-of-the-prompt-t-0") == ["long:64: 1.00 (1.00 to 1.00)"]
    _, pictures = render_report([evaluation("a")], ["no words"], False)
    assert dots(pictures, "along-the-answer-by-length-of-the-answer-t-0") == [
        "5 to 9 tokens, 1 text: 2.00 (2.00 to 2.00)",
        "10 to 14 tokens, 1 text: 4.00 (4.00 to 4.00)",
    ]


def test_the_answer_shown_is_typical_does_not_loop_and_is_cut_when_it_is_long() -> None:
    shown = evaluation("a")
    keys = [TextKey("a", 0.0, "draft", index) for index in range(4)]
    m = summarise("a", 0.0, list(shown.texts.values()))
    typical = dict(zip(keys, (text(3, is_looping=True), text(7), text(4, 400), text(2)), strict=True))
    assert m.acceptance
    assert m.acceptance.mean_acceptance_length == 3.0
    report = replace(shown.report, measurements=(replace(m, num_prompts=4),))
    found = typical_text(replace(shown, report=report, texts=typical))
    assert found == keys[2], "of equals the first, the looping one last"
    long = replace(shown, report=replace(report, measurements=(replace(m, num_prompts=2),)))
    long = replace(long, texts={keys[0]: text(9, is_looping=True), keys[1]: typical[keys[2]]})
    html, _ = render_report([long], [lambda ids: "<x>" * len(ids)], False)
    assert "a, prompt 1, T\u00a0=\u00a00, the first 1000 tokens" in html
    assert html.count("&lt;x&gt;") == 1000


def test_a_prompt_without_rounds_is_no_difference() -> None:
    first = evaluation("b")
    lonely = dict(zip(first.texts, (text(1), text(1, 0)), strict=True))
    measured = (summarise("b", 0.0, list(lonely.values())),)
    asked = {"prompts": {"b": {"count": 2, "sha256": "x"}}, "temperatures": [0.0]}
    second = replace(first, report=replace(first.report, settings=asked, measurements=measured), texts=lonely)
    both = [replace(first, report=replace(first.report, settings=asked)), second]
    html, pictures = render_report(both, ["", ""], True)
    assert dots(pictures, "compared-each-prompt-b-t-0") == ["a prompt: +2.00"]
    compared = html[html.index("<h2>Compared</h2>") : html.index("<h2>Checks</h2>")]
    assert compared.count("<figure>") == 2


def test_a_text_that_is_not_plain_decodings_is_named() -> None:
    shown = evaluation("a")
    equality = GreedyEquality(1, 1, 1e-3, (Difference(1, 7, 0.5, False),))
    measured = (replace(shown.report.measurements[0], equality=equality),)
    html, _ = render_report([replace(shown, report=replace(shown.report, measurements=measured))], ["no words"], False)
    assert "<li>draft, a: prompt 1 leaves plain decoding at new token 7" in html
    assert "A FAULT" in html
    assert "<li>Who wrote what: no words.</li>" in html


def test_the_drafts_training_is_drawn_beside_what_decoding_gave() -> None:
    rows = [{"step": 5.0, "loss": 2.0, "acceptance_length": 1.5}, {"step": 10.0, "loss": 1.0, "acceptance_length": 2.5}]
    shown = evaluation("a")
    _, pictures = render_report([replace(shown, training=rows)], ["no words"], False)
    loss, length = "how-the-draft-learned-loss", "how-the-draft-learned-acceptance-length"
    assert dots(pictures, loss) == ["loss: 1 at 10"]
    (curve,) = marks(pictures[loss].args[0], "curve")
    assert [tuple(point) for point in curve.get_xydata()] == [(5, 2), (10, 1)]
    assert dots(pictures, length) == ["estimated: 2.5 at 10"], "nothing was decoded at temperature 1"
    warm = replace(shown.report, measurements=(replace(shown.report.measurements[0], temperature=1.0),))
    texts = {key._replace(temperature=1.0): text for key, text in shown.texts.items()}
    _, pictures = render_report([replace(shown, report=warm, texts=texts, training=rows)], ["no words"], False)
    assert dots(pictures, length) == ["estimated: 2.5 at 10", "decoded: 3 at 10"]
    html, _ = render_report([shown], ["no words"], False)
    assert "<li>How the draft learned: no metrics.jsonl lies beside the draft.</li>" in html


def test_differences_lie_about_zero_in_the_middle() -> None:
    shown = evaluation("a")
    found = [PairedComparison(2, 1.0, 1.0, mean, (mean - 0.5, mean + 0.5), 0.25) for mean in (0.5, 0.25)]
    pairings = tuple(Pairing("a", float(place), "other", comparison) for place, comparison in enumerate(found))
    report = replace(shown.report, pairings=pairings)
    _, pictures = render_report([replace(shown, report=report)], ["no words"], False)
    figure = pictures["paired-differences-minus-other"].args[0]
    assert said(figure, "dot")[0] == "a, T = 0, p = 0.250: 0.50 (0.00 to 1.00)"
    left, right = figure.axes[0].get_xlim()
    assert -left == right >= 1
    assert any(list(line.get_xdata()) == [0, 0] and line.get_linestyle() == "--" for line in figure.axes[0].lines)


def test_axes_hold_what_was_teacher_forced_too_and_are_alike() -> None:
    shown = evaluation("a", "b")
    far = TeacherForcedStatistics(2.5, (2.0, 17.5), (0.7, 0.5), 99)
    first, second = shown.report.measurements
    report = replace(shown.report, measurements=(replace(first, teacher_forced=far), second))
    _, pictures = render_report([replace(shown, report=report)], ["no words"], False)
    for task in "ab":
        assert pictures[f"tokens-a-round-{task}-t-0"].args[0].axes[0].get_xlim()[1] >= 17.5


def test_a_section_that_no_run_can_show_becomes_a_sentence() -> None:
    shown, sure = evaluation("a"), Calibration(2, 0.5, 0.5, 0.0, 0.0, 0.5, (Bin(0.0, 1.0, 2, 0.5, 0.5),))
    measured = replace(shown.report.measurements[0], confidence=ConfidenceStatistics(sure, ()))
    other = replace(shown, folder=Path("b"), report=replace(shown.report, measurements=(measured,)))
    html, _ = render_report([shown, other], ["no <words>", "none"], False)
    assert '<div class="run"><h3>run</h3><p class="missing">No draft says how sure it is.</p>' in html
    titles = re.findall(r"<h2>(.*?)</h2>", html)
    assert titles[-2:] == ["Left out", "Where this comes from"]
    assert "<li>Who wrote what: no &lt;words&gt;.</li>" in html
    assert "Who wrote what" not in titles
    assert html.count('<main class="wide">') == 1
    assert "How far confidence can be believed" in titles


def test_pictures_have_names_of_their_own_that_are_good_for_files() -> None:
    shown = evaluation("a")
    names = ("../T", "./T", "x" * 999)
    measured = tuple(replace(shown.report.measurements[0], task=name) for name in names)
    texts = {key._replace(task=name): text for key, text in shown.texts.items() for name in names}
    report = replace(shown.report, measurements=measured, settings={})
    _, pictures = render_report([replace(shown, report=report, texts=texts)], ["no words"], False)
    found = [name for name in pictures if name.startswith("tokens-a-round-")]
    assert found == ["tokens-a-round-t-t-0", "tokens-a-round-t-t-0-2", f"tokens-a-round-{'x' * 76}-t-0"]
    two = [replace(shown, folder=Path("One")), replace(shown, folder=Path("two"))]
    _, pictures = render_report(two, ["no words"] * 2, False)
    assert [name for name in pictures if "round-one" in name or "round-two" in name] == [
        "tokens-a-round-one-t-0",
        "tokens-a-round-two-t-0",
        "accepted-drafts-a-round-one-t-0",
        "accepted-drafts-a-round-two-t-0",
    ]
