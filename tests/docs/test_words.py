"""Pages stay short: their words in all, and the sentences of those that most readers open."""

from __future__ import annotations

import runpy
from typing import Any

import pytest
from paths import ROOT

READ_FIRST = (
    "README docs/index docs/own-loop docs/transformers docs/lightning docs/pretrained docs/deploying docs/choosing"
)


@pytest.fixture(scope="module")
def words() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "words.py"))


def test_all_pages_together_have_at_most_30_000_words(words: dict[str, Any]) -> None:
    assert sum(words["count"](page.read_text()) for page in words["pages"]()) <= 30_000


@pytest.mark.parametrize("page", READ_FIRST.split())
def test_no_sentence_has_more_than_35_words(page: str, words: dict[str, Any]) -> None:
    found = words["sentences"]((ROOT / f"{page}.md").read_text())
    assert len(found) > 10
    assert [sentence for sentence in found if len(sentence.split()) > 35] == []


def test_code_and_tables_are_no_sentences_but_each_item_of_a_list_is(words: dict[str, Any]) -> None:
    page = "# A title\n\nOne two `x y` [three](four.md). Five!\n\n```\ncode here\n```\n| a | b |\n- six\n- seven\n"
    assert words["sentences"](page) == ["One two Code three.", "Five!", "six", "seven"]
    assert words["count"]("| a | b-c |\n") == 2
