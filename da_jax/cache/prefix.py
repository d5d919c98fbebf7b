"""The prefix cache: whole pages of prompts that were prefilled with everything visible.

A page is found by its name, a digest of all that shapes what it holds: the model and how it is run,
the page size, and every token up to the page's end. All full-attention layers of a model share
block tables, so one name stands for the pages of all of them.

A model that also has rings or recurrent states cannot start behind a prefix with the pages alone.
For it, copies of both are kept at some page borders, in slots of their own; without such a copy
there is no hit.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from da_jax.cache.pages import PagePool


def page_names(root: bytes, tokens: np.ndarray, page_size: int) -> list[bytes]:
    """Names of the whole pages that `tokens` [N] fill, each with all that comes before it.

    Args:
      root: what stands for the model, its dtypes and its layers.
      tokens: int32 [N].
      page_size: tokens a page.
    """
    name = hashlib.blake2b(root + page_size.to_bytes(4, "little"), digest_size=16).digest()
    names = []
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = np.asarray(tokens[start : start + page_size], "<i4").tobytes()
        name = hashlib.blake2b(name + page, digest_size=16).digest()
        names.append(name)
    return names


class PrefixCache:
    """Finds what of a prompt is in the cache already.

    Args:
      pool: the page pool.
      root: what stands for the model, see `page_names`.
      snapshots: slots that hold copies of rings and states; None for a model that has neither.
    """

    def __init__(self, pool: PagePool, root: bytes, snapshots: Sequence[int] | None = None):
        self.pool, self.root = pool, root
        self._copies = snapshots is not None
        self._empty = list(snapshots or ())
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by name; least recently used first

    @property
    def keeps_copies(self) -> bool:
        """Whether there are slots for such copies."""
        return bool(self._empty or self._slots)

    def match(self, names: Sequence[bytes], known: int = 0) -> tuple[list[int], int | None]:
        """The pages that follow the first `known` pages of a prompt, and where its copy is.

        Returns:
          (pages after the known ones, slot of the copy of rings and states at their end or None).
          Nothing is held yet.
        """
        pages = self.pool.find(names[known:])
        if not self._copies:
            return pages, None
        for count in range(len(pages), 0, -1):
            slot = self._slots.get(names[known + count - 1])
            if slot is not None:
                return pages[:count], slot
        return [], None

    def used(self, name: bytes) -> None:
        """The copy of that name was read."""
        self._slots.move_to_end(name)

    def slot_for(self, name: bytes) -> int | None:
        """A slot to copy rings and states to; None if the copy exists or none can be kept.

        The copy that was not used longest gives way. Once it is made, say so with `keep`.
        """
        if name in self._slots or not self.keeps_copies:
            return None
        if not self._empty:
            self._empty.append(self._slots.popitem(last=False)[1])
        return self._empty[-1]

    def keep(self, name: bytes, slot: int) -> None:
        """The copy of that name is in the slot that `slot_for` gave."""
        self._empty.remove(slot)
        self._slots[name] = slot
