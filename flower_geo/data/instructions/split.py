"""Which conversations are held out: decided by what is asked, not by order or file.

Conversations are grouped by their question (letters' case and blanks do not
count), so the same question never stands on both sides with other answers, and
groups are ranked by a keyed hash.  Where few questions make up most of a part,
so that the share cannot be met, whole conversations are ranked instead.

In a source of several categories each has its own share, and what one holds out
no other one trains on: whichever categories a site has, its held-out questions
are unknown to all sites.
"""

from __future__ import annotations

import logging
from array import array

import numpy as np
import numpy.typing as npt

from flower_geo.data.instructions.forms import Conversation
from flower_geo.data.split import chosen, part_digest

__all__ = ["Ranks"]

_LOG = logging.getLogger(__name__)


class Ranks:
    """Hashes of conversations, a few bytes each, in the order they were added."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._asked = array("Q")
        self._whole = array("Q")
        self._category: list[str] = []

    def add(self, conversation: Conversation) -> None:
        """Rank one more."""
        whole = "\n".join(f"{role}: {text}" for role, text in conversation.turns)
        self._asked.append(self._rank(conversation.asked))
        self._whole.append(self._rank(whole))
        self._category.append(conversation.category)

    def held_out(self, share: float, least: int, name: str) -> npt.NDArray[np.bool_]:
        """Which of them are held out, bool [n].

        Args:
            share: of each category, 0 < share <= 1; 1 = everything.
            least: conversations to hold out in each category at least.
            name: of the source, for the log.
        """
        if share == 1:
            return np.ones(len(self._asked), dtype=np.bool_)
        asked = np.array(self._asked, dtype=np.uint64)
        whole = np.array(self._whole, dtype=np.uint64)
        category = np.array(self._category, dtype=np.str_)
        by_question = np.zeros(asked.size, dtype=np.bool_)
        held = np.zeros(asked.size, dtype=np.bool_)
        for part in np.unique(category):
            here = np.flatnonzero(category == part)
            out = _first(asked[here], share, least)
            if out.sum() <= 2 * max(share * here.size, least) and 2 * out.sum() < here.size:
                by_question[here] = True
            else:
                # Of the shipped parts this is known; their users need not read it.
                _LOG.log(
                    logging.DEBUG if part else logging.INFO,
                    "%s: few questions make up most of it, so the same question may be trained on "
                    "and held out with other answers",
                    f"{name}, {part}" if part else name,
                )
                out = _first(whole[here], share, least)
            held[here] = out
        questions = np.unique(asked[held & by_question])
        held |= by_question & np.isin(asked, questions)
        return held | np.isin(whole, np.unique(whole[held]))

    def _rank(self, text: str) -> int:
        return part_digest(" ".join(text.split()).casefold(), self._seed)[0]


def _first(digest: npt.NDArray[np.uint64], share: float, least: int) -> npt.NDArray[np.bool_]:
    ones = np.ones(digest.size, dtype=np.int64)
    return chosen(digest, ones, share, ones, least)
