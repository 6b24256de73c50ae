"""The page of evaluations: several tasks and their mean, long prompts, the answer that is shown, differences."""

import re
from dataclasses import replace
from pathlib import Path

import torch

from dspark.decode.round import Round
from dspark.eval.evaluation import Evaluation
from dspark.eval.measure import Difference, GreedyEquality, summarise
from dspark.eval.page.report import render_report, typical_text
from dspark.eval.records import TextKey
from dspark.eval.report import EvalReport
from dspark.eval.timing import DecodedText

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
    header = re.search(r"<header>.*</header>", render_report([shown], ["no words"], False)[0])
    assert header
    return header[0]


def test_the_headline_is_a_task_with_its_interval_or_the_mean_over_real_tasks() -> None:
    one = headline(evaluation("a", "made"))
    assert (
        "With &lt;draft&gt;, a pass of target yields 3.00 tokens at T&nbsp;=&nbsp;0, instead of 1 "
        "(2 prompts of a, none of 2 texts ends in a loop)" in one
    )
    assert "<b>3.00</b>" in one
    assert "95 %: 2.00 - 4.00" in one
    several = headline(evaluation("a", "b", "made"))
    assert "yields 3.50 tokens at T&nbsp;=&nbsp;0, instead of 1 (mean over 2 tasks, " in several
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
    assert "long:64: 1.00 (1.00 to 1.00)" in pictures["along-the-answer-by-length-of-the-prompt-t-0"]
    _, pictures = render_report([evaluation("a")], ["no words"], False)
    chart = pictures["along-the-answer-by-length-of-the-answer-t-0"]
    assert re.findall(r'class="name"[^>]*>(\d.*?)<', chart) == [
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
    assert "a, prompt 1, T&nbsp;=&nbsp;0, the first 1000 tokens" in html
    assert html.count("&lt;x&gt;") == 1000


def test_a_prompt_without_rounds_is_no_difference() -> None:
    first = evaluation("b")
    lonely = dict(zip(first.texts, (text(1), text(1, 0)), strict=True))
    measured = (summarise("b", 0.0, list(lonely.values())),)
    asked = {"prompts": {"b": {"count": 2, "sha256": "x"}}, "temperatures": [0.0]}
    second = replace(first, report=replace(first.report, settings=asked, measurements=measured), texts=lonely)
    html, _ = render_report([replace(first, report=replace(first.report, settings=asked)), second], ["", ""], True)
    compared = html[html.index("<h2>Compared</h2>") : html.index("<h2>Checks</h2>")]
    assert re.findall(r"<title>a prompt: (.*?)</title>", compared) == ["+2.00"]


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
    html, svgs = render_report([replace(shown, training=rows)], ["no words"], False)
    assert "<title>loss: 1 at 10</title>" in html
    assert "<title>estimated: 2.5 at 10</title>" in html
    assert "<title>decoded" not in html, "nothing was decoded at temperature 1"
    assert {"how-the-draft-learned-loss", "how-the-draft-learned-acceptance-length"} <= svgs.keys()
    warm = replace(shown.report, measurements=(replace(shown.report.measurements[0], temperature=1.0),))
    texts = {replace(key, temperature=1.0): text for key, text in shown.texts.items()}
    html, _ = render_report([replace(shown, report=warm, texts=texts, training=rows)], ["no words"], False)
    assert "<title>decoded: 3 at 10</title>" in html
    html, _ = render_report([shown], ["no words"], False)
    assert "<li>How the draft learned: no metrics.jsonl lies beside the draft.</li>" in html
