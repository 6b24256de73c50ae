"""Copies are found, exact and near, and nothing else is."""

import random
from pathlib import Path

import numpy as np
import pytest

from dspark.data.duplicates import Fingerprints

WORDS = [f"w{number}" for number in range(5000)]


def texts_of(number: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    return [" ".join(chance.choices(WORDS, k=60)) for _ in range(number)]


def found(folder: Path, texts: list[str], similarity: float | None) -> list[tuple[int, bool]]:
    folder.mkdir(exist_ok=True, parents=True)
    prints = Fingerprints(folder)
    for start in range(0, len(texts), 7):
        prints.add(texts[start : start + 7])
    earlier_N, is_near_N = prints.find(similarity)
    return list(zip(earlier_N.tolist(), is_near_N.tolist(), strict=True))


def changed(text: str, places: list[int]) -> str:
    words = text.split()
    for place in places:
        words[place] = f"x{place}"
    return " ".join(words)


def test_a_text_in_other_case_and_spaces_is_a_repetition_of_the_first(tmp_path: Path) -> None:
    first, second = texts_of(2)
    texts = [first, second, f"  {first.upper()}", second.replace(" ", "\n"), first, "3 + 4?", "3 - 4?", "3+4 ?"]
    assert [place for place, _ in found(tmp_path, texts, None)] == [-1, -1, 0, 1, 0, -1, -1, 5]
    assert [place for place, _ in found(tmp_path / "near", texts, 0.8)] == [-1, -1, 0, 1, 0, -1, -1, 5]


@pytest.mark.parametrize(("num_changed", "is_near"), [(1, True), (12, False)])
def test_similarity_says_what_is_near(num_changed: int, is_near: bool, tmp_path: Path) -> None:
    """A word of 56 shingles spoils five: 51 of 61 are shared (0.84); of twelve, spread, hardly any."""
    base = texts_of(200)
    near = [changed(text, list(range(5, 60, 60 // num_changed))[:num_changed]) for text in base]
    pairs = found(tmp_path, base + near, 0.7)
    assert pairs[:200] == [(-1, False)] * 200
    right = sum(pair == ((place, True) if is_near else (-1, False)) for place, pair in enumerate(pairs[200:]))
    assert right >= 198


def test_the_share_of_equal_minima_is_the_similarity(tmp_path: Path) -> None:
    """0.84 against thresholds on either side: all within three deviations of 128 minima."""
    base = texts_of(150, 1)
    near = [changed(text, [30]) for text in base]
    shares = []
    for name, similarity in (("low", 0.74), ("even", 51 / 61), ("high", 0.94)):
        pairs = found(tmp_path / name, base + near, similarity)
        shares.append(np.mean([is_near for _, is_near in pairs[150:]]))
    assert shares[0] > 0.98
    assert 0.3 < shares[1] < 0.7
    assert shares[2] < 0.02


def test_signs_without_spaces_are_words(tmp_path: Path) -> None:
    text = "请用三句话说明为什么天空在白天是蓝色的而在日落的时候会变成红色并且举一个日常生活里的例子"
    other = "请写一首关于秋天和月亮的短诗其中要有一条河一座桥还有一个远行的人最后一句要回到开头"
    pairs = found(tmp_path, [text, text[:-1] + "事", other], 0.7)
    assert pairs == [(-1, False), (0, True), (-1, False)]


def test_the_earliest_of_many_alike_is_named(tmp_path: Path) -> None:
    (text,) = texts_of(1)
    alike = [changed(text, [place]) for place in (55, 56, 57, 58, 59)]
    assert [pair[0] for pair in found(tmp_path, [text, *alike], 0.7)] == [-1, 0, 0, 0, 0, 0]
