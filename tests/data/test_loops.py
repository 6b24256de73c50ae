"""A loop is found at the end of an answer whatever its period, and ordinary text with repetitions is none."""

import random

import pytest

from dspark.data.loops import COPIES, LEAST_TOKENS, ends_in_loop

CHANCE = random.Random(0)
TEXT = [CHANCE.randrange(5000) for _ in range(900)]
LINE, PARAGRAPH = TEXT[:12], TEXT[100:300]


@pytest.mark.parametrize(
    ("ids", "is_loop"),
    [
        (TEXT, False),
        (TEXT[:95], False),
        ([], False),
        ([7] * 96, True),
        (TEXT + [7] * 96, True),
        (TEXT + [7] * 95, False),
        (TEXT + LINE * 8, True),
        (TEXT + LINE * 8 + [7], False),
        (TEXT + PARAGRAPH * 3, True),
        ((TEXT + PARAGRAPH * 4)[:-77], True),
        (TEXT + PARAGRAPH * 2, False),
        ((TEXT[:100] + [9] * 70) * 3, True),
    ],
)
def test_a_token_a_phrase_and_a_paragraph_over_and_over_are_loops(ids: list[int], is_loop: bool) -> None:
    assert ends_in_loop(ids) == is_loop


def test_lists_tables_and_code_with_repeated_lines_are_none() -> None:
    numbered = [token for number in range(200) for token in (*LINE, 6000 + number)]
    table = [token for number in range(100) for token in (5, 6000 + number % 10, 5, 6000 + number // 10, 5, 8)]
    code = TEXT[:300] + LINE * 7 + TEXT[300:320]
    zeros = TEXT[:50] + [3, 4] * 47
    for ids in (numbered, table, code, code[:-20], zeros):
        assert not ends_in_loop(ids)


def by_definition(ids: list[int]) -> bool:
    def is_loop(period: int) -> bool:
        length = max(COPIES * period, LEAST_TOKENS)
        tail = ids[-length:]
        return len(ids) >= length and tail[period:] == tail[:-period]

    return any(is_loop(period) for period in range(1, len(ids) // COPIES + 1))


def test_the_search_finds_what_the_definition_says() -> None:
    found = []
    for _ in range(1500):
        run = [CHANCE.randrange(3) for _ in range(CHANCE.randrange(1, 60))]
        ids = [CHANCE.randrange(3) for _ in range(40)] + (run * 300)[: CHANCE.randrange(60, 260)]
        if CHANCE.random() < 0.3:
            ids[-CHANCE.randrange(1, len(ids))] += 1
        found.append(ends_in_loop(ids))
        assert found[-1] == by_definition(ids)
    assert 300 < sum(found) < 1200
