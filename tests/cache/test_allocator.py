"""Page tables: sharing, copying, windows, and 10,000 random operations against a model."""

import random

import hypothesis
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from xsake.cache import PageAllocator
from xsake.cache.allocator import NO_PAGE
from xsake.errors import ArgumentError, CacheError

PAGES, SIZE = 24, 4


class Memory:
    """An allocator, the contents of its pages, and what each sequence should contain."""

    def __init__(self):
        self.allocator = PageAllocator(PAGES, SIZE)
        self.pages = [[None] * SIZE for _ in range(PAGES)]
        self.expected: dict[int, list[int | None]] = {}  # None: dropped behind a window
        self.written = 0

    def add(self):
        self.expected[self.allocator.add()] = []

    def fork(self, sequence, length):
        try:
            fork = self.allocator.fork(sequence, length)
        except ArgumentError as error:
            assert error.slug == "cache-dropped"
            return
        self.expected[fork] = self.expected[sequence][:length]

    def append(self, sequence, tokens):
        before = self.allocator.table([sequence])
        try:
            new = self.allocator.append(sequence, tokens)
        except CacheError:
            assert self.allocator.num_needed(sequence, tokens) > self.allocator.num_free
            assert self.allocator.table([sequence]).tolist() == before.tolist()
            return
        for source, target in new.copies:
            self.pages[target] = list(self.pages[source])
        assert new.start == len(self.expected[sequence])
        (table,) = self.allocator.table([sequence])
        for position in range(new.start, new.start + tokens):
            self.written += 1
            self.pages[table[position // SIZE]][position % SIZE] = self.written
            self.expected[sequence].append(self.written)

    def truncate(self, sequence, length):
        try:
            self.allocator.truncate(sequence, length)
        except ArgumentError as error:
            assert error.slug == "cache-dropped"
            return
        del self.expected[sequence][length:]

    def drop_window(self, sequence, first, sinks):
        self.allocator.drop_window(sequence, first, sinks)
        (table,) = self.allocator.table([sequence])
        content = self.expected[sequence]
        for number, page in enumerate(table):
            own = slice(number * SIZE, (number + 1) * SIZE)
            if page == NO_PAGE and content[own] != [None] * SIZE:
                assert sinks <= own.start and own.stop <= first
                content[own] = [None] * SIZE

    def free(self, sequence):
        self.allocator.free(sequence)
        del self.expected[sequence]

    def check(self):
        """Every sequence reads what it wrote, and no page is lost."""
        self.allocator.check()
        for sequence, content in self.expected.items():
            (table,) = self.allocator.table([sequence])
            assert self.allocator.length(sequence) == len(content)
            for position, value in enumerate(content):
                if value is not None:
                    assert self.pages[table[position // SIZE]][position % SIZE] == value


class Machine(stateful.RuleBasedStateMachine):
    """The operations in any order."""

    def __init__(self):
        super().__init__()
        self.memory = Memory()

    def _sequence(self, data):
        return data.draw(st.sampled_from(sorted(self.memory.expected)))

    @stateful.rule()
    def add(self):
        self.memory.add()

    @stateful.precondition(lambda self: self.memory.expected)
    @stateful.rule(data=st.data(), tokens=st.integers(0, 11))
    def append(self, data, tokens):
        self.memory.append(self._sequence(data), tokens)

    @stateful.precondition(lambda self: self.memory.expected)
    @stateful.rule(data=st.data())
    def fork_or_truncate(self, data):
        sequence = self._sequence(data)
        length = data.draw(st.integers(0, len(self.memory.expected[sequence])))
        data.draw(st.sampled_from([self.memory.fork, self.memory.truncate]))(sequence, length)

    @stateful.precondition(lambda self: self.memory.expected)
    @stateful.rule(data=st.data(), first=st.integers(0, 40), sinks=st.integers(0, 9))
    def drop_window(self, data, first, sinks):
        self.memory.drop_window(self._sequence(data), first, sinks)

    @stateful.precondition(lambda self: self.memory.expected)
    @stateful.rule(data=st.data())
    def free(self, data):
        self.memory.free(self._sequence(data))

    @stateful.invariant()
    def agrees(self):
        self.memory.check()


TestMachine = Machine.TestCase
TestMachine.settings = hypothesis.settings(stateful_step_count=40, deadline=None)


def test_10000_operations_with_64_sequences_leak_nothing():
    rng, memory = random.Random(0), Memory()
    for step in range(10_000):
        sequences = sorted(memory.expected)
        if not sequences or (len(sequences) < 64 and rng.random() < 0.2):
            memory.add()
            continue
        sequence = rng.choice(sequences)
        length = rng.randint(0, len(memory.expected[sequence]))
        rng.choice([
            lambda: memory.append(sequence, rng.randint(0, 9)),  # noqa: B023
            lambda: memory.append(sequence, 1),  # noqa: B023
            lambda: memory.fork(sequence, length) if len(sequences) < 64 else None,  # noqa: B023
            lambda: memory.truncate(sequence, length),  # noqa: B023
            lambda: memory.drop_window(sequence, length, rng.randint(0, 5)),  # noqa: B023
            lambda: memory.free(sequence) if rng.random() < 0.3 else None,  # noqa: B023
        ])()  # fmt: skip
        if step % 10 == 0:
            memory.check()
    for sequence in list(memory.expected):
        memory.free(sequence)
    memory.check()
    assert memory.allocator.num_free == PAGES


def test_what_is_refused_says_so():
    allocator = PageAllocator(2, SIZE)
    sequence = allocator.add()
    allocator.append(sequence, 2 * SIZE)
    refused = [
        (lambda: allocator.append(sequence, 1), "cache-full"),
        (lambda: allocator.append(sequence, -1), "cache-append"),
        (lambda: allocator.truncate(sequence, 9), "cache-length"),
        (lambda: allocator.table([sequence], 1), "cache-table-width"),
        (lambda: allocator.length(7), "cache-sequence"),
        (lambda: PageAllocator(0, 4), "cache-size"),
    ]
    for call, slug in refused:
        with pytest.raises((ArgumentError, CacheError)) as refusal:
            call()
        assert refusal.value.slug == slug
