"""The page of dspark report in a real browser: it fits, is silent, asks for nothing, and its plots have their marks."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from evaluating import write_evaluations
from playwright.sync_api import Page, sync_playwright
from rounds_file import read_rounds
from typer.testing import CliRunner

from dspark.cli.main import app

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed (Debian: apt-get install chromium)")
WIDTHS = (360, 768, 1280)
SCHEMES = ("light", "dark")
PLOTS = """() => [...document.querySelectorAll("figure")].map(figure => ({
    section: figure.closest("section").querySelector("h2").textContent,
    run: figure.closest(".run")?.querySelector("h3").textContent,
    title: figure.querySelector("figcaption").textContent.replaceAll("\u00a0", " "),
    dots: figure.querySelectorAll("g.dot").length,
    bars: figure.querySelectorAll("g.bar").length,
    lines: figure.querySelectorAll("g.curve").length,
    whiskers: figure.querySelectorAll("g.whisker").length,
}))"""
OUTSIDE = """() => {
    const wrong = [];
    for (const svg of document.querySelectorAll("svg")) {
        const box = svg.getBoundingClientRect();
        for (const mark of svg.querySelectorAll("text, g.bar, g.dot, g.curve, g.whisker")) {
            const b = mark.getBoundingClientRect();
            const isWide = b.left < box.left - 1 || b.right > box.right + 1;
            const isHigh = b.top < box.top - 1 || b.bottom > box.bottom + 1;
            if (isWide || isHigh || b.width + b.height === 0) wrong.push(mark.outerHTML);
        }
    }
    for (const name of document.querySelectorAll("h1, h2, h3, th[scope=row], figcaption, p, li, dd, pre, figure")) {
        if (name.getBoundingClientRect().right > innerWidth) wrong.push(name.outerHTML);
    }
    return wrong;
}"""
COLOURS = """() => ["body", "figure", "i", "mark", "g.bar path", "g.dot use", "svg text"].map(name => {
    const style = getComputedStyle(document.querySelector(name));
    return name.includes(" ") ? style.fill : style.backgroundColor;
})"""


@dataclass
class Browser:
    """A page, what it asked for, what it complained of, and the evaluations it shows."""

    page: Page
    first: dict[str, Any]
    place: Path
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def plots(self, section: str, run: str) -> dict[str, dict[str, Any]]:
        found: list[dict[str, Any]] = self.page.evaluate(PLOTS)
        return {plot["title"]: plot for plot in found if plot["section"] == section and plot["run"] in {run, None}}

    def drafted(self, temperature: float) -> list[dict[str, Any]]:
        """The first evaluation's measurements that have an acceptance."""
        everyone = (self.first["measurements"], *self.first["baselines"].values())
        return [m for group in everyone for m in group if m["temperature"] == temperature and m["acceptance"]]


def rename(folder: Path, old: str, new: str) -> None:
    """A contender of an evaluation."""
    for name in ("report.json", "texts.jsonl"):
        path = folder / name
        path.write_text(path.read_text().replace(f'"{old}"', f'"{new}"'))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """The page of two compared evaluations, in which another draft has a long name."""
    place = tmp_path_factory.mktemp("browser")
    first, second = map(str, write_evaluations(place))
    rename(place / "first", "ngram", f"runs/2026-11-29/{'MUCH-WIDER-' * 4}/draft")
    result = CliRunner().invoke(app, ["report", "--compare", first, second], catch_exceptions=False)
    assert result.exit_code == 0, result.stdout
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--disable-gpu", "--disable-quic"]
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        page = chromium.new_page()
        found = Browser(page, json.loads((place / "first" / "report.json").read_text()), place)
        page.on("request", lambda request: found.requests.append(request.url))
        page.on("console", lambda message: found.complaints.append(message.text))
        page.on("pageerror", lambda error: found.complaints.append(str(error)))
        page.goto((place / "first" / "report.html").as_uri())
        yield found
        chromium.close()


def test_the_page_asks_for_nothing_and_complains_of_nothing(browser: Browser) -> None:
    browser.page.reload()
    own = (browser.place / "first" / "report.html").as_uri()
    assert browser.requests == [own] * len(browser.requests) != []
    assert browser.complaints == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows_and_every_mark_lies_in_its_plot(browser: Browser, width: int, scheme: Any) -> None:
    browser.page.emulate_media(color_scheme=scheme)
    browser.page.set_viewport_size({"width": width, "height": 800})
    assert browser.page.evaluate("document.documentElement.scrollWidth") == width
    assert browser.page.evaluate(OUTSIDE) == []


def test_light_and_dark_have_colours_of_their_own(browser: Browser) -> None:
    found = []
    for scheme in SCHEMES:
        browser.page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        found.append(browser.page.evaluate(COLOURS))
    assert all(light != dark for light, dark in zip(*found, strict=True))
    black, clear = "rgb(0, 0, 0)", "rgba(0, 0, 0, 0)"
    assert not {black, clear} & {*found[0], *found[1]}, "a colour was not found"


def test_every_plot_has_a_mark_for_every_number(browser: Browser) -> None:
    for temperature in (0.0, 1.0):
        at, drafted = f"T = {temperature:g}", browser.drafted(temperature)
        acceptances = [m["acceptance"] for m in drafted]
        assert len(drafted) == 3
        lengths = browser.plots("Tokens a round", "first")[at]
        assert (lengths["dots"], lengths["whiskers"]) == (3, 3)
        slots = browser.plots("Where a round ends", "first")
        for name in ("survival", "conditional"):
            shares = [share for a in acceptances for share in a[name] if share is not None]
            assert slots[f"{name.capitalize()}, {at}"]["bars"] == len(shares) > 4
        bars = browser.plots("Accepted drafts a round", "first")[at]
        assert bars["bars"] == sum(len(a["histogram"]) for a in acceptances)
        bins = [b for m in drafted if m["confidence"] for b in m["confidence"]["overall"]["bins"] if b["num_slots"]]
        assert browser.plots("How far confidence can be believed", "first")[at]["dots"] == len(bins) > 1
        costs = browser.plots("What a round costs", "first")[at]
        assert costs["bars"] == 4 * 4, "four phases of three that draft and of plain decoding"
        (bar,) = (plot for title, plot in browser.plots("What a round costs", "second").items() if title == at)
        assert bar["bars"] == len({"draft", "verify", "commit", "other"}), "as it was measured"
        forced = browser.plots("Teacher-forced and decoded", "first")
        assert forced[f"Length, {at}"]["dots"] == 2
        assert forced[f"Survival, {at}"]["bars"] == 8


def test_every_stretch_of_the_answer_is_a_dot(browser: Browser) -> None:
    places: dict[float, set[tuple[str, int]]] = {0.0: set(), 1.0: set()}
    for key, rounds in read_rounds(browser.place / "first" / "rounds.parquet").items():
        starts = [1 + sum(r.acceptance_length for r in rounds[:index]) for index in range(len(rounds))]
        places[key.temperature] |= {(key.contender, start // 5) for start in starts}
    plots = browser.plots("Along the answer", "first")
    for temperature, found in places.items():
        plot = plots[f"By place, T = {temperature:g}"]
        assert (plot["dots"], plot["lines"]) == (len(found), 3)
        assert plots[f"By length of the answer, T = {temperature:g}"]["dots"] > 0


def test_two_drafts_are_compared_in_plots_and_the_answer_is_coloured(browser: Browser) -> None:
    compared = [plot for plot in browser.page.evaluate(PLOTS) if plot["section"] == "Compared"]
    assert [plot["dots"] for plot in compared] == [2, 3, 3], "temperatures, then the prompts of each"
    assert [plot["dots"] for plot in browser.plots("Paired differences", "second").values()] == [2]
    counts = [browser.page.locator(f"pre {name}").count() for name in ("mark", "span")]
    assert all(count > 0 for count in counts)
