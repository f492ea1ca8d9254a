"""Ways in which the two halves of a split model train each other."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from flower_geo.errors import ConfigError
from flower_geo.models.split import Cut, SplitPart, tied_names

__all__ = ["MODES", "Auxiliary", "Mode", "check_mode", "check_part", "meets", "sends_labels"]

#: ``vanilla``: the cloud has head and loss (Gupta and Raskar 2018).  ``u-shape``: head and
#: labels stay at the site (Vepakomma et al. 2018).  ``sfl-v1``: a cloud half for each site,
#: averaged when the round ends; ``sfl-v2``: one cloud half that takes the sites in turn
#: (Thapa et al. 2022).  ``cse``: a head of its own trains the site's half and nothing comes
#: back (Mu and Shen 2023).  ``sage``: that head is aligned to the cloud's gradient now and
#: then (Nair et al. 2025).
Mode = Literal["vanilla", "u-shape", "sfl-v1", "sfl-v2", "cse", "sage"]
MODES: tuple[Mode, ...] = get_args(Mode)


@dataclass(frozen=True, kw_only=True)
class Auxiliary:
    """The site's own head, for ``cse`` and ``sage``.

    Attributes:
        width: of its hidden layer.
        lr: its learning rate under ``sage``; under ``cse`` it has the site's.
        align_every: steps from one alignment to the next, the first at the first step.
        align_steps: optimizer steps of one alignment.

    Raises:
        ConfigError: a value is out of its range.
    """

    width: int = 64
    lr: float = 3e-3
    align_every: int = 10
    align_steps: int = 8

    def __post_init__(self) -> None:
        for name, good in (
            ("width", self.width >= 1),
            ("lr", math.isfinite(self.lr) and self.lr > 0),
            ("align_every", self.align_every >= 1),
            ("align_steps", self.align_steps >= 1),
        ):
            if not good:
                raise ConfigError(
                    f"auxiliary {name.replace('_', '-')}={getattr(self, name)} is out of range; "
                    "use a number above 0"
                )


def sends_labels(mode: Mode) -> bool:
    """Whether the cloud sees the labels."""
    return mode != "u-shape"


def meets(mode: Mode) -> bool:
    """Whether the cloud takes a step once for all sites together."""
    return mode not in ("sfl-v1", "sfl-v2")


def check_mode(mode: Mode, cut: Cut) -> None:
    """Raise ``ConfigError`` unless there is such a mode and the cut fits it."""
    if mode not in MODES:
        raise ConfigError(f"split mode {mode!r} is none of {', '.join(MODES)}")
    if cut.u_shape == sends_labels(mode):
        wanted = "no layer" if sends_labels(mode) else "the last layers"
        raise ConfigError(
            f"mode {mode} needs {wanted} on top at the site, and the model is cut with "
            f"{cut.top} top layers there; change one of the two"
        )


def check_part(part: SplitPart) -> None:
    """Raise ``ConfigError`` where a tied weight would be trained on both sides."""
    trained = [n for n, p in part.named_parameters() if p.requires_grad and n in tied_names(part)]
    if trained:
        raise ConfigError(
            f"{trained[0]} is trained, and site and cloud hold a copy each of it; "
            "leave it frozen, or cut in u-shape"
        )
