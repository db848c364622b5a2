"""The KV pool's bookkeeping: which page is free, owned, shared or cached. Tensors live in the runner.

Pages are numbered 0..num_pages; page 0 is the null page, which nobody owns: padding rows write there and block tables
are padded with it. Every other page is in exactly one of three states:

    free      on the free stack
    owned     in the block table of ``ref[page]`` >= 1 running sequences; of more than one only if it is full and their
              common prefix
    cached    owned by nobody, but its content is known under a key, so that an equal prefix can take it back; evicted,
              least recently used first, when the free stack is empty

A page of any state may be unclean: it may hold numbers that are not finite. A masked key counts as zero times its
value, so that such a page is zeroed when it is allocated again, before its new owner reads it (`take_unclean`). A
cached page that is taken back is not: its content is what is wanted.

All verbs cost O(pages moved), whatever the pool's size; but `suspect_all`, of which broken numbers are the only cause.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

NULL_PAGE = np.zeros(1, np.int64)
_NO_PAGES = np.empty(0, np.int64)


class PagePool:
    """Pages of the KV cache.

    Args:
        num_pages: pages that can be owned; the null page comes on top.
    """

    def __init__(self, num_pages: int) -> None:
        assert num_pages >= 1
        self.num_pages = num_pages
        self._stack = np.arange(num_pages, 0, -1, dtype=np.int64)  # low page ids on top
        self._top = num_pages
        self._ref = np.zeros(num_pages + 1, dtype=np.int32)
        self._key_of: dict[int, bytes] = {}  # registered pages, owned or cached
        self._page_of: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._unclean = np.zeros(num_pages + 1, dtype=bool)
        self._to_clean: list[np.ndarray] = []  # given away since `take_unclean`
        self.num_evicted = 0

    @property
    def num_available(self) -> int:
        """Pages that :meth:`allocate` can give: free ones and cached ones."""
        return self._top + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_owned(self) -> int:
        return self.num_pages - self.num_available

    def allocate(self, count: int) -> np.ndarray:
        """``count`` pages (int64), each owned once from now on. The caller checked ``num_available``."""
        assert 0 <= count <= self.num_available, f"{count} pages asked, {self.num_available} available"
        while self._top < count:
            page, _ = self._cached.popitem(last=False)
            del self._page_of[self._key_of.pop(page)]
            self._stack[self._top] = page
            self._top += 1
            self.num_evicted += 1
        self._top -= count
        pages = self._stack[self._top : self._top + count][::-1].copy()
        self._ref[pages] = 1
        self._note_unclean(pages)
        return pages

    def release(self, pages: np.ndarray) -> None:
        """Give up one ownership of each of ``pages`` (distinct, in the order of the sequence).

        A page that nobody owns any more is cached if its content is registered, else free. The sequence's tail is
        released first, so that eviction eats a prefix from its end.
        """
        pages = pages[::-1]
        self._ref[pages] -= 1
        orphans = pages[self._ref[pages] == 0]
        assert (self._ref[pages] >= 0).all(), "a page was released more often than owned"
        if self._key_of:
            known = np.fromiter((page in self._key_of for page in orphans.tolist()), bool, len(orphans))
            for page in orphans[known].tolist():
                self._cached[page] = None
            orphans = orphans[~known]
        self._stack[self._top : self._top + len(orphans)] = orphans
        self._top += len(orphans)

    # Pages that may hold numbers that are not finite.

    def suspect(self, pages: np.ndarray) -> None:
        """Note that ``pages``, the null page among them or not, may hold such numbers."""
        self._unclean[pages] = True

    def suspect_all(self) -> None:
        """The same of every page, owned ones and the null page included."""
        self._unclean[:] = True

    def take_unclean(self) -> np.ndarray:
        """What is to be zeroed before the next step: the unclean ones of the pages that were allocated since the last
        call, and of the null page. They count as clean from now on.
        """
        self._note_unclean(NULL_PAGE)
        if not self._to_clean:
            return _NO_PAGES
        pages = np.concatenate(self._to_clean)
        self._to_clean.clear()
        return pages

    def _note_unclean(self, pages: np.ndarray) -> None:
        unclean = pages[self._unclean[pages]]
        if len(unclean):
            self._unclean[unclean] = False
            self._to_clean.append(unclean)

    # Prefix cache. A key stands for a page's tokens, everything before them and the weights (prefix_cache.py).

    def lookup(self, keys: list[bytes]) -> list[int]:
        """Pages of the longest run of ``keys`` from the start whose content is known. Takes no ownership."""
        pages = []
        for key in keys:
            page = self._page_of.get(key)
            if page is None:
                break
            pages.append(page)
        return pages

    def num_unowned(self, pages: list[int]) -> int:
        """How many of ``pages`` are cached, that is, would leave ``num_available`` when shared."""
        return sum(page in self._cached for page in pages)

    def share(self, pages: list[int]) -> None:
        """Own each of ``pages``, which :meth:`lookup` returned, once more."""
        for page in pages:
            self._cached.pop(page, None)
        self._ref[pages] += 1

    def register(self, page: int, key: bytes) -> None:
        """Note that the owned ``page`` holds ``key``'s content. A second page with the same content stays unknown."""
        assert self._ref[page] > 0, "only an owned page can be registered"
        if key in self._page_of or page in self._key_of:
            return
        self._key_of[page] = key
        self._page_of[key] = page

    def forget(self) -> None:
        """Drop all known content: cached pages become free, owned ones merely unknown."""
        count = len(self._cached)
        self._stack[self._top : self._top + count] = np.fromiter(self._cached, np.int64, count)
        self._top += count
        self._cached.clear()
        self._key_of.clear()
        self._page_of.clear()

    def audit(self, block_tables: list[np.ndarray]) -> None:
        """Check the whole accounting against the block tables of all running sequences.

        Raises:
            AssertionError: names the first rule that is broken.
        """
        owned = np.concatenate([np.empty(0, np.int64), *block_tables])
        assert (owned > 0).all(), "the null page is in a block table"
        assert all(len(np.unique(table)) == len(table) for table in block_tables), "a sequence owns a page twice"
        counts = np.bincount(owned, minlength=self.num_pages + 1)
        assert (counts == self._ref).all(), f"reference counts differ at pages {np.flatnonzero(counts != self._ref)}"
        columns = np.concatenate([np.empty(0, np.int64), *(np.arange(len(table)) for table in block_tables)])
        column_of = np.full(self.num_pages + 1, -1)
        column_of[owned] = columns
        assert (column_of[owned] == columns).all(), "a page is shared by sequences that disagree on its position"
        free = self._stack[: self._top]
        cached = np.fromiter(self._cached, np.int64, len(self._cached))
        everything = np.concatenate([free, cached, np.flatnonzero(counts)])
        assert len(everything) == self.num_pages, f"{len(everything)} pages accounted for, {self.num_pages} exist"
        assert (np.sort(everything) == np.arange(1, self.num_pages + 1)).all(), "a page is in two states, or in none"
        assert all(page in self._key_of for page in self._cached), "a cached page without content"
        assert {page: key for key, page in self._page_of.items()} == self._key_of, "the key tables disagree"
