"""The far-copy probe: which tokens stand where, and which predictions are counted."""

import numpy as np
import pytest

from tests.evaluation.sample import tokenized
from xsake.evaluation.score import Scores
from xsake.evaluation.trial import far_copies

SIZE = 32


def copies(books, gaps, **options):
    return far_copies(books, books.documents, gaps, **{"passage": SIZE} | options)


def copying_model(tokens) -> Scores:
    """Knows a token for sure if the last 8 tokens came before, and was followed by it then."""
    seen, nll = {}, []
    for place in range(1, len(tokens)):
        before = bytes(tokens[max(0, place - 8) : place].astype(np.uint8))
        nll.append(0.0 if seen.get(before) == tokens[place] else 5.0)
        seen[before] = tokens[place]
    return Scores(np.array(nll, np.float32))


@pytest.mark.parametrize("opening", [(), (3,)])
def test_the_copies_are_the_same_tokens_with_the_gap_between(opening):
    found, notes = copies(tokenized(500, 400, 300, opening=opening), (16, 64), samples=3)
    assert len(found) == 6 and not notes
    for copy in found:
        tokens, (first, second) = copy.trial.tokens, copy.trial.spans
        assert len(tokens) == len(opening) + 2 * SIZE + copy.gap
        assert tokens[: len(opening)].tolist() == list(opening)
        assert second.start - first.start == SIZE + copy.gap
        assert first.end - first.start == second.end - second.start == SIZE - 1
        # From the token before each span on, which is the copy's own first one.
        one, two = (tokens[span.start - 1 : span.end] for span in (first, second))
        np.testing.assert_array_equal(one, two)
        assert second.end == len(tokens)


def test_a_model_that_copies_gets_the_second_copy_for_nothing():
    found, _ = copies(tokenized(2000, 2000), (64, 256))
    for copy in found:
        first, second = copying_model(copy.trial.tokens).sums(copy.trial.spans)["dense_nll"]
        assert first == 5.0 * (SIZE - 1)
        # The model needs 8 tokens of the copy to know where it is.
        assert second == 5.0 * 7


def test_passage_and_gap_come_from_different_documents():
    books = tokenized(300, 300, 300)
    texts = {d.name: bytes(books.tokens(d).astype(np.uint8)) for d in books.documents}
    found, _ = copies(books, (64,), samples=3)
    owners = [copy.trial.document.split(" at ")[0] for copy in found]
    assert sorted(owners) == sorted(texts)
    for owner, copy in zip(owners, found, strict=True):
        tokens = bytes(copy.trial.tokens.astype(np.uint8))
        assert tokens[:SIZE] in texts[owner]
        assert tokens[SIZE : SIZE + 64] not in texts[owner]


def test_one_document_gives_both_from_places_that_do_not_meet():
    books = tokenized(400)
    (whole,) = (books.tokens(document) for document in books.documents)
    for seed in range(5):
        (copy,), _ = copies(books, (200,), samples=1, seed=seed)
        tokens = bytes(copy.trial.tokens.astype(np.uint8))
        start = bytes(whole.astype(np.uint8)).index(tokens[:SIZE])
        assert tokens[SIZE : SIZE + 200] == bytes(whole[200:].astype(np.uint8))
        assert start + SIZE <= 200


def test_the_seed_decides_and_a_longer_gap_begins_like_a_shorter():
    books = tokenized(900, 900, 900)
    tokens = lambda **options: [
        copy.trial.tokens.tolist() for copy in copies(books, (32, 64), **options)[0]
    ]
    assert tokens(seed=1) == tokens(seed=1) != tokens(seed=2)
    short, long = tokens(samples=1)
    assert long[: SIZE + 32] == short[: SIZE + 32]


def test_gaps_that_the_texts_or_the_attention_cannot_give_are_said():
    found, notes = copies(tokenized(100), (16, 5000), samples=1)
    assert [copy.gap for copy in found] == [16]
    assert notes == ["far copy: skipped gap 5000 in sample 1, the texts have only 68 more tokens"]
    found, notes = copies(tokenized(40, 40, 40, 40), (100,), samples=1)
    assert len(found) == 1 and not notes  # short documents fill a gap together
    found, notes = copies(tokenized(20), (16,))
    assert not found and notes == ["far copy: no document has 32 tokens"]
    found, notes = copies(tokenized(900, 900), (16, 100), max_tokens=100)
    assert {copy.gap for copy in found} == {16} and "exceed the limit of 100" in notes[0]


def test_an_attention_of_one_length_gets_that_length_and_the_same_question():
    books = tokenized(900, 900)
    plain, _ = copies(books, (16,))
    padded, _ = copies(books, (16,), tokens=128)
    for one, other in zip(plain, padded, strict=True):
        assert len(other.trial.tokens) == 128
        assert other.trial.spans == one.trial.spans
        np.testing.assert_array_equal(other.trial.tokens[: len(one.trial.tokens)], one.trial.tokens)
