"""Which tensors of an adapter a round trains and sends, and the slice a site of lower rank has.

An adapter's state has PEFT's names: ``<module>.lora_A.weight`` [rank, in],
``<module>.lora_B.weight`` [out, rank], and modules that are trained whole.  Factors
that were folded into the frozen base stand beside it, under ``fold.<round>.``.
The coordinator and the sites read the same rules here.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping

from torch import Tensor

from flower_geo.errors import RoundError

__all__ = [
    "FOLD",
    "fold_names",
    "fold_sides",
    "folds_in",
    "is_fold",
    "module_of",
    "modules_in",
    "ranks_of",
    "sent",
    "sliced",
    "stays",
    "trained",
]

#: Names of folded factors begin with this.
FOLD = "fold."
_A, _B = ".lora_A.weight", ".lora_B.weight"


def is_fold(name: str) -> bool:
    """Whether a tensor is a factor that was folded into the base."""
    return name.startswith(FOLD)


def fold_names(module: str, round: int) -> tuple[str, str]:
    """Names of the A and B of a module that a round folds into the base."""
    return fold_sides(f"{FOLD}{round:06d}.{module}")


def fold_sides(key: str) -> tuple[str, str]:
    """Names of the A and B behind a key of :func:`folds_in`."""
    return key + _A, key + _B


def folds_in(state: Mapping[str, Tensor]) -> dict[str, tuple[str, Tensor, Tensor]]:
    """Folded factors of a state: (module, B, A) by a key that sorts by round.

    Raises:
        RoundError: one of a pair is missing.
    """
    found = {}
    for name, a in state.items():
        if not (is_fold(name) and name.endswith(_A)):
            continue
        key = name.removesuffix(_A)
        if key + _B not in state:
            raise RoundError(f"{name} has no lora_B beside it")
        found[key] = (key.removeprefix(FOLD).partition(".")[2], state[key + _B], a)
    if 2 * len(found) != sum(map(is_fold, state)):
        raise RoundError("a folded lora_B has no lora_A beside it")
    return found


def module_of(name: str) -> str:
    """The module a factor belongs to; "" for another tensor."""
    for ending in (_A, _B):
        if name.endswith(ending):
            return name.removesuffix(ending)
    return ""


def modules_in(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Names of the A and B of each module that has factors, folded ones left out."""
    found = {module_of(name): None for name in names if module_of(name) and not is_fold(name)}
    return {module: (module + _A, module + _B) for module in found}


def trained(name: str, aggregation: str, round: int) -> bool:
    """Whether a site trains a tensor in ``round``.

    ``ffa`` never trains A.  ``alternate`` trains B in odd rounds, A in even ones: while
    B is still zero, A has no gradient.
    """
    if is_fold(name):
        return False
    if name.endswith(_A):
        return aggregation != "ffa" and not (aggregation == "alternate" and round % 2)
    if name.endswith(_B):
        return not (aggregation == "alternate" and round % 2 == 0)
    return True


def stays(name: str, personal: Iterable[str]) -> bool:
    """Whether a tensor never leaves its site: it matches one of the shell patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in personal)


def sent(name: str, aggregation: str, round: int, personal: Iterable[str] = ()) -> bool:
    """Whether a site sends what it trained: all but what stays."""
    return trained(name, aggregation, round) and not stays(name, personal)


def ranks_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, int]:
    """Rank by module.

    Raises:
        RoundError: the two factors of a module differ in it, or are no matrices.
    """
    ranks: dict[str, int] = {}
    for name, shape in shapes.items():
        module = module_of(name)
        if not module:
            continue
        rank = shape[0 if name.endswith(_A) else 1] if len(shape) == 2 else 0
        if rank < 1 or ranks.setdefault(module, rank) != rank:
            raise RoundError(f"the factors of {module} have no rank in common")
    return ranks


def sliced(base: Mapping[str, Tensor], ranks: Mapping[str, int]) -> dict[str, Tensor]:
    """``base`` as a site of these ranks has it: the first columns of B and rows of A.

    Modules without a rank stay whole.  The slices are contiguous, and copies only
    where they are smaller.

    Raises:
        RoundError: a rank is larger than the base's.
    """
    found = {}
    for name, tensor in base.items():
        rank = ranks.get(module_of(name))
        if rank is None:
            found[name] = tensor
            continue
        side = 0 if name.endswith(_A) else 1
        if not 1 <= rank <= tensor.shape[side]:
            raise RoundError(
                f"{name} has rank {rank} at a site and {tensor.shape[side]} at the coordinator; "
                "a site's rank may be lower, never higher"
            )
        found[name] = tensor.narrow(side, 0, rank).contiguous()
    return found
