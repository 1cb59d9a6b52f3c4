"""Page tables of sequences, on the host: allocation, sharing, truncation, windows.

Page n of a sequence holds its tokens from `n * page_size` on. A page may belong to several
sequences; it is copied before one of them writes to it, and free again when none has it.
"""

import dataclasses
from collections import Counter
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int

from xsake.errors import ArgumentError, CacheError

NO_PAGE = -1  # in a table: never allocated, or freed behind a window


@dataclasses.dataclass
class _Sequence:
    table: list[int]
    length: int


@dataclasses.dataclass(frozen=True)
class Append:
    """Pages of appended tokens.

    Args:
        start: position of the first new token.
        copies: `(source, target)` of pages that have to be copied before the tokens are written.
    """

    start: int
    copies: tuple[tuple[int, int], ...]


class PageAllocator:
    """Page tables of sequences that share a pool of pages.

    Args:
        num_pages: of the pool.
        page_size: tokens of a page.

    Example:
        >>> from xsake.cache import PageAllocator
        >>> allocator = PageAllocator(num_pages=8, page_size=4)
        >>> prompt = allocator.add()
        >>> allocator.append(prompt, 6)
        Append(start=0, copies=())
        >>> answer = allocator.fork(prompt)  # both pages are shared
        >>> allocator.append(answer, 1)  # the second one is copied before it is written to
        Append(start=6, copies=((1, 2),))
        >>> allocator.table([prompt, answer]).tolist(), allocator.num_free
        ([[0, 1], [0, 2]], 5)
    """

    def __init__(self, num_pages: int, page_size: int):
        if min(num_pages, page_size) < 1:
            raise ArgumentError(
                "cache-size",
                "a cache needs pages, and pages need tokens",
                got=f"num_pages={num_pages}, page_size={page_size}",
                expected="1 or more",
            )
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages))[::-1]  # the lowest is taken first
        self._references = [0] * num_pages
        self._sequences: dict[int, _Sequence] = {}
        self._next = 0

    @property
    def num_free(self) -> int:
        """Pages that no sequence has."""
        return len(self._free)

    @property
    def sequences(self) -> tuple[int, ...]:
        """Sequences that exist."""
        return tuple(self._sequences)

    def length(self, sequence: int) -> int:
        """Return the number of tokens of a sequence."""
        return self._get(sequence).length

    def add(self) -> int:
        """Create an empty sequence."""
        return self._insert(_Sequence([], 0))

    def fork(self, sequence: int, length: int | None = None) -> int:
        """Create a sequence that shares the pages of another one's first `length` tokens."""
        source = self._get(sequence)
        length = source.length if length is None else self._check_length(source, length)
        table = source.table[: self._count_pages(length)]
        for page in table:
            self._take(page)
        return self._insert(_Sequence(table, length))

    def num_needed(self, sequence: int, tokens: int) -> int:
        """Return the pages that `append` would take."""
        x = self._get(sequence)
        grown = self._count_pages(x.length + tokens) - len(x.table)
        return grown + (tokens > 0 and self._writes_to_shared(x))

    def append(self, sequence: int, tokens: int) -> Append:
        """Allocate pages for new tokens of a sequence; nothing changes if too few are free.

        Raises:
            CacheError: the pool has too few free pages.
        """
        if tokens < 0:
            raise ArgumentError(
                "cache-append", "cannot append a negative number of tokens", got=tokens,
                expected="0 or more", fix="truncate",
            )  # fmt: skip
        x, needed = self._get(sequence), self.num_needed(sequence, tokens)
        if needed > len(self._free):
            raise CacheError(
                "cache-full",
                "the cache has too few free pages",
                got=f"{needed} pages needed for {tokens} tokens, {len(self._free)} free",
                expected=f"at most {len(self._free)}",
                fix="free a sequence, or create a larger cache",
            )
        start, copies = x.length, []
        if tokens and self._writes_to_shared(x):
            shared = x.table[-1]
            x.table[-1] = self._allocate()
            self._release(shared)
            copies.append((shared, x.table[-1]))
        x.length += tokens
        while len(x.table) < self._count_pages(x.length):
            x.table.append(self._allocate())
        return Append(start, tuple(copies))

    def truncate(self, sequence: int, length: int) -> None:
        """Drop the tokens of a sequence from position `length` on."""
        x = self._get(sequence)
        x.length = self._check_length(x, length)
        kept = self._count_pages(length)
        for page in x.table[kept:]:
            self._release(page)
        del x.table[kept:]

    def drop_window(self, sequence: int, first: int, num_sinks: int = 0) -> None:
        """Free pages whose tokens are all before position `first` and not among the first few.

        For layers that see a window and `num_sinks` tokens at the beginning only. The last page
        stays.
        """
        x = self._get(sequence)
        end = min(first // self.page_size, len(x.table) - 1)
        for number in range(self._count_pages(num_sinks), end):
            self._release(x.table[number])
            x.table[number] = NO_PAGE

    def free(self, sequence: int) -> None:
        """Remove a sequence."""
        for page in self._get(sequence).table:
            self._release(page)
        del self._sequences[sequence]

    def table(
        self, sequences: Sequence[int], width: int | None = None
    ) -> Int[np.ndarray, "B width"]:
        """Return where each page of some sequences lies; `NO_PAGE` after their ends.

        Args:
            sequences: one for each row.
            width: pages of a row; None: as many as the longest needs.
        """
        tables = [self._get(sequence).table for sequence in sequences]
        longest = max(map(len, tables), default=0)
        width = longest if width is None else width
        if longest > width:
            raise ArgumentError(
                "cache-table-width", "a sequence has more pages than a row of the table",
                got=f"{longest} pages", expected=f"at most {width}", fix="pass a larger width",
            )  # fmt: skip
        rows = np.full((len(tables), width), NO_PAGE, np.int32)
        for row, table in zip(rows, tables, strict=True):
            row[: len(table)] = table
        return rows

    def lengths(self, sequences: Sequence[int]) -> Int[np.ndarray, " B"]:
        """Return the tokens of some sequences."""
        return np.array([self._get(sequence).length for sequence in sequences], np.int32)

    def check(self) -> None:
        """Raise AssertionError unless references and free pages agree with the tables."""
        pages = [p for x in self._sequences.values() for p in x.table if p != NO_PAGE]
        counts = Counter(pages)
        assert self._references == [counts[page] for page in range(self.num_pages)]
        assert sorted(self._free) == [p for p, n in enumerate(self._references) if n == 0]
        for x in self._sequences.values():
            assert len(x.table) == self._count_pages(x.length)

    def _get(self, sequence: int) -> _Sequence:
        if sequence not in self._sequences:
            raise ArgumentError(
                "cache-sequence", "no such sequence", got=sequence,
                expected="a sequence of `add` or `fork` that has not been freed",
            )  # fmt: skip
        return self._sequences[sequence]

    def _insert(self, x: _Sequence) -> int:
        self._next += 1
        self._sequences[self._next - 1] = x
        return self._next - 1

    def _count_pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _writes_to_shared(self, x: _Sequence) -> bool:
        """Whether the next token goes to a page that another sequence has too."""
        return x.length % self.page_size != 0 and self._references[x.table[-1]] > 1

    def _check_length(self, x: _Sequence, length: int) -> int:
        if not 0 <= length <= x.length:
            raise ArgumentError(
                "cache-length", "a sequence cannot be cut there", got=length,
                expected=f"0 to {x.length}",
            )  # fmt: skip
        if length % self.page_size and x.table[length // self.page_size] == NO_PAGE:
            raise ArgumentError(
                "cache-dropped", "the page of the last token was dropped behind a window",
                got=length, expected="a position whose page exists",
            )  # fmt: skip
        return length

    def _allocate(self) -> int:
        page = self._free.pop()
        self._references[page] = 1
        return page

    def _take(self, page: int) -> None:
        if page != NO_PAGE:
            self._references[page] += 1

    def _release(self, page: int) -> None:
        if page == NO_PAGE:
            return
        self._references[page] -= 1
        if not self._references[page]:
            self._free.append(page)
