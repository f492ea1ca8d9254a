"""How fast a site's line is, told from the times of its rounds.

A round's time on the way is one number, seen from outside: polls, processes that
start, and two transfers.  `Link` keeps what a round trip costs by itself and both
slownesses (seconds a megabyte) as one estimate with a covariance, a Kalman filter
over

    seconds = overhead + megabytes up * slowness up + megabytes down * slowness down,

in which a newer observation counts more than an older one.  The greeting, which
carries nothing, tells the overhead; the first round, which sends nothing down, the
uplink.  Where fewer bytes take as long as before, it was overhead all along; where
two rounds say the same of the mixture, what was known of the parts stays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Link"]

#: Shortest transfer told from none, and the longest trip that means anything.
SHORTEST, LONGEST = 0.05, 1e7
#: Seconds by which one round trip differs from the next, whatever it carries: the
#: standard deviation of where an event falls between two polls 3 seconds apart.
JITTER = 0.9
#: Share by which a line's speed is thought to change from round to round, and by
#: which one transfer differs from the next.
DRIFT, NOISE = 0.25, 0.15
#: Share of a transfer's seconds that is never known better.
USUAL = 0.25
#: What is not known of the overhead after a greeting: seconds, and a share of it.
VAGUE = (1.0, 0.5)
#: Seconds by which an overhead may change of a sudden.
SURPRISE = 5.0
#: Innovations beyond so many standard deviations are cut, unless one follows another.
OUTLIER = 3.0


@dataclass
class Link:
    """A site's line as seen in the times of its rounds.

    Attributes:
        overhead: seconds of a round trip that carries nothing; None before a greeting.
        slow: seconds a megabyte, up and down; empty before the first observation.
        spread: covariance of overhead and both slownesses, by rows.
        last: megabytes of the last trip, up and down, speeds by hand left out.
        odd: sign and number of the outliers in a row.
        declared: bytes a second given by hand, up and down; they win.
    """

    overhead: float | None = None
    slow: list[float] = field(default_factory=list)
    spread: list[list[float]] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    odd: int = 0
    declared: list[float | None] = field(default_factory=lambda: [None, None])

    def speed(self, way: int) -> float | None:
        """Bytes a second, up (0) or down (1); None while not known."""
        by_hand = self.declared[way]
        if by_hand is not None:
            return by_hand
        return 1e6 / self.slow[way] if self.slow else None

    def seconds(self, way: int, nbytes: float) -> float | None:
        """Seconds so many bytes take, without the overhead."""
        speed = self.speed(way)
        return None if speed is None else nbytes / speed

    def least(self, way: int, nbytes: float) -> float | None:
        """Seconds so many bytes take, and less where that is hardly known.

        What few bytes told is known less and less, beside an overhead that varies; so
        it comes to be tried again.  How sure both transfers of the last trip together
        are is what counts: their parts may never be told apart.
        """
        mean = self.seconds(way, nbytes)
        if mean is None or self.declared[way] is not None:
            return mean
        (up, down), (slow_up, slow_down) = self.last, self.slow
        _, (_, own_up, both), (_, _, own_down) = self.spread
        variance = up * up * own_up + 2 * up * down * both + down * down * own_down
        unsure = math.sqrt(max(variance, 0.0)) / (up * slow_up + down * slow_down)
        return mean * min(max((1.0 - unsure) / (1.0 - USUAL), 0.05), 1.0)

    def empty(self, seconds: float) -> None:
        """A round trip without a payload, beyond the site's work; the first one counts."""
        if self.overhead is None and -LONGEST < seconds < LONGEST:
            self.overhead = round(max(seconds, 0.0), 3)

    def observe(self, up: float, down: float, seconds: float) -> None:
        """A round trip's bytes and its seconds beyond the site's work.

        Seconds are taken to the millisecond: below it is the clock's own noise.
        """
        sent = [max(up, 0.0) / 1e6, max(down, 0.0) / 1e6]
        if not (0 < seconds < LONGEST and 0 < sum(sent) < LONGEST):
            return
        for way, by_hand in enumerate(self.declared):
            if by_hand is not None:
                seconds -= sent[way] * 1e6 / by_hand
                sent[way] = 0.0
        seconds = max(round(seconds, 3), SHORTEST)
        if sum(sent) * 1e6 < 1:
            return  # all of it was known before
        if not self.slow:
            self._begin(sent, seconds)
        else:
            # What was not used has not been seen to change.
            for place, amount in enumerate((0.2 + 0.1 * self._at[0], *self.slow)):
                if place == 0:
                    self.spread[0][0] += amount**2
                elif sent[place - 1]:
                    self.spread[place][place] += (DRIFT * amount) ** 2
        self.last = sent
        self._update([1.0, *sent], seconds)

    @property
    def _at(self) -> list[float]:
        return [self.overhead or 0.0, *self.slow]

    def _begin(self, sent: list[float], seconds: float) -> None:
        """What is left of the first trip was transfer, at the same speed both ways."""
        known = self.overhead or 0.0
        first = max(seconds - known, SHORTEST) / sum(sent)
        self.slow = [first, first]
        vague = VAGUE[0] + VAGUE[1] * known
        # A way that was not used is thought to be alike, or faster.
        up, down = ((first * (3.0 if each else 1.0)) ** 2 for each in sent)
        self.spread = [[vague**2, 0.0, 0.0], [0.0, up, 0.0], [0.0, 0.0, down]]

    def _update(self, weights: list[float], seconds: float) -> None:
        at = self._at
        expected = sum(w * a for w, a in zip(weights, at, strict=True))
        error = seconds - expected
        noise = JITTER**2 + (NOISE * expected) ** 2
        reach, own = self._reach(weights)
        limit = OUTLIER * math.sqrt(own + noise)
        if abs(error) <= limit:
            self.odd = 0
        else:
            sign = 1 if error > 0 else -1
            self.odd = self.odd + sign if self.odd * sign > 0 else sign
            if abs(self.odd) == 1:
                # One alone is an accident on the way and moves little.
                error = sign * limit
            else:
                # Two in a row: something is other than before.  The line is believed
                # first, since fewer bytes then tell whether it was.
                self.spread[0][0] += min(error / 4, SURPRISE + at[0] / 2) ** 2
                for place in (1, 2):
                    if weights[place]:
                        self.spread[place][place] += (error / sum(weights[1:])) ** 2
                reach, own = self._reach(weights)
        gain = [r / (own + noise) for r in reach]
        moved = [a + g * error for a, g in zip(at, gain, strict=True)]
        self.overhead = max(moved[0], 0.0)
        # A slowness stays above zero: at most to a fifth in one step.
        self.slow = [max(m, s / 5) for m, s in zip(moved[1:], self.slow, strict=True)]
        self.spread = [
            [p - g * r if place != across else max(p - g * r, 0.0)
             for across, (p, r) in enumerate(zip(row, reach, strict=True))]
            for place, (row, g) in enumerate(zip(self.spread, gain, strict=True))
        ]  # fmt: skip

    def _reach(self, weights: list[float]) -> tuple[list[float], float]:
        """Covariance with what is expected of a trip, and the variance of that itself."""
        reach = [sum(p * w for p, w in zip(row, weights, strict=True)) for row in self.spread]
        return reach, max(sum(w * r for w, r in zip(weights, reach, strict=True)), 0.0)
