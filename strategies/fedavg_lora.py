"""Federated LoRA: adapters go up, what they stand for is averaged, one adapter comes down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from flwr.app import ArrayRecord
from torch import Tensor

from flower_geo.aggregation import Contribution, ServerOptimizer, weighted_mean
from flower_geo.aggregation.adapter_parts import (
    fold_names,
    fold_sides,
    folds_in,
    is_fold,
    module_of,
    modules_in,
    ranks_of,
    sent,
    sliced,
    trained,
)
from flower_geo.aggregation.lora import Aggregate, Pair, aggregate, combine, compact
from flower_geo.compression import Codec
from flower_geo.compression.records import STYPE
from flower_geo.config import FedAvgLoRAConfig, names_of, parse
from flower_geo.errors import CorruptPayload, ReplyRefused, RoundError
from flower_geo.strategies.adapter import AdapterModel
from flower_geo.strategies.base import GeoStrategy
from flower_geo.strategies.terms import Terms

__all__ = ["FedAvgLoRA"]

#: Rules whose next model is linear in what the sites send.
_LINEAR = ("avg", "ffa", "alternate")


class FedAvgLoRA(GeoStrategy):
    """Federated fine-tuning of LoRA adapters over a frozen base.

    Sent down: the adapter at the coordinator's rank, and factors folded into the base.
    Sent up: what a site trained of the adapter, at its own rank, as differences.  The
    next adapter is the rule of ``aggregation`` over the sites' updates ``s B A``.

    Args:
        config: a checked configuration; by default made from ``options``.
        options: configuration keys in Python spelling (``aggregation="residual"``).

    Raises:
        ConfigError: an option is unknown or out of range.
    """

    config: FedAvgLoRAConfig
    #: Of the configuration, and of the model that is made from it.
    kinds: ClassVar[tuple[type[FedAvgLoRAConfig], type[AdapterModel]]] = (
        FedAvgLoRAConfig, AdapterModel,
    )  # fmt: skip

    def __init__(self, config: FedAvgLoRAConfig | None = None, **options: Any) -> None:
        kind, model = self.kinds
        if config is None:
            config = parse(kind, {name.replace("_", "-"): v for name, v in options.items()})
        super().__init__(config)
        self.model = model(config)
        self.personal = names_of(config.personal)
        self.optimizer = ServerOptimizer(
            config.server_optimizer, config.server_lr, config.server_momentum,
            config.server_momentum, config.server_beta2, config.server_tau,
        )  # fmt: skip
        self._moments: dict[str, Tensor] = {}
        self._errors: dict[str, float] = {}

    def terms(self) -> Terms:
        """An adapter is the model, its folded factors come and go, sites send parts of it."""
        return Terms(type(self).__name__, self.model, self._part, is_fold)

    def _part(
        self, round: int, base: Mapping[str, Tensor], arrays: ArrayRecord
    ) -> Mapping[str, Tensor]:
        rule = self.config.aggregation
        wanted = {n: t for n, t in base.items() if sent(n, rule, round, self.personal)}
        try:
            # What the blobs hold is what counts; the record only says so.
            shapes = {
                name: Codec.inspect(array.data).shape
                for name, array in arrays.items()
                if name in wanted and array.stype == STYPE
            }
            return sliced(wanted, ranks_of(shapes))
        except (RoundError, CorruptPayload) as error:
            raise ReplyRefused(str(error)) from None

    def next_model(
        self,
        master: Mapping[str, Tensor],
        base: Mapping[str, Tensor],
        replies: Sequence[Contribution],
    ) -> dict[str, Tensor]:
        """Return the next adapter, and what of it is folded into the base."""
        means, fresh = dict[str, Tensor](), dict[str, Tensor]()
        extras: dict[str, Pair] = {}
        weights, self._errors = [reply.weight for reply in replies], {}
        for module, names in modules_in(base).items():
            made = self._aggregated(module, names, base, replies, weights)
            self._errors[module] = made.error if math.isfinite(made.error) else 1.0
            if self.config.aggregation == "stack":
                # All of it goes into the base; the sites begin with a fresh A and B = 0.
                extras[module] = made.at_scale_one()
                fresh |= self.model.fresh(names, base[names[0]], base[names[1]], self.round)
                continue
            if made.extra is not None:
                extras[module] = made.extra
            scale = self.model.adapter.scale_of(module)
            b = made.B if made.scale == scale else made.B * (made.scale / scale)
            # A frozen side stays the coordinator's own: sites of lower rank had part of it.
            means |= {
                name: factor
                for name, factor in zip(names, (made.A, b), strict=True)
                if trained(name, self.config.aggregation, self.round)
            }
        whole = [name for name in base if not module_of(name) and not is_fold(name)]
        means |= weighted_mean(base, replies, whole)
        return self._folded(master, extras) | fresh | self._stepped(master, base, means)

    def _aggregated(
        self,
        module: str,
        names: tuple[str, str],
        base: Mapping[str, Tensor],
        replies: Sequence[Contribution],
        weights: Sequence[float],
    ) -> Aggregate:
        rule, scale = self.config.aggregation, self.model.adapter.scale_of(module)
        return aggregate(
            rule, [self._factors(base, names, reply, scale) for reply in replies], weights,
            None if rule == "stack" else int(base[names[0]].shape[0]),
            extra_rank=(self.config.fold_rank or None) if rule == "residual" else None,
        )  # fmt: skip

    def _stepped(
        self, master: Mapping[str, Tensor], base: Mapping[str, Tensor], means: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The server optimizer's step on the means; what broadcasts still owe stays owed."""
        before = {name: base[name] for name in means}
        after, self._moments = self.optimizer.step(before, means, self._moments)
        turned = self.config.aggregation not in _LINEAR
        for name in after:
            # Factors that a rule has turned have nothing in common with what was owed.
            if master[name] is not base[name] and not (turned and module_of(name)):
                after[name] = after[name] + (master[name] - base[name])
        return after

    def _factors(
        self, base: Mapping[str, Tensor], names: tuple[str, str], reply: Contribution, scale: float
    ) -> tuple[Tensor, Tensor, float]:
        """A site's B and A as they are after its training; what it did not send is the base's."""
        local, there = [], reply.names()
        held = {name: reply.blob(name) for name in names if name in there}
        shapes = {name: Codec.inspect(blob).shape for name, blob in held.items()}
        start = sliced({name: base[name] for name in names}, ranks_of(shapes))
        for name in names:
            if name in held:
                tensor = Codec.decode(held[name], shape=tuple(start[name].shape))
                local.append(tensor if reply.kind == "weights" else start[name] - tensor)
            else:
                local.append(start[name])
        return local[1], local[0], scale

    def _folded(self, state: Mapping[str, Tensor], extras: Mapping[str, Pair]) -> dict[str, Tensor]:
        """``state`` with one more pair under the base for each module that has an extra one.

        Where a module's pairs would take more room than two whole weights, they become
        one of the rank they really have, which is never more than its smaller side.
        """
        following = dict(state)
        held: dict[str, dict[str, Pair]] = {}
        for key, (module, b, a) in folds_in(state).items():
            held.setdefault(module, {})[key] = (b, a)
        for module, (b, a) in extras.items():
            if not bool(b.any()) or not bool(a.any()):
                continue
            before = held.get(module, {})
            if sum(len(each) for _, each in before.values()) + len(a) > 2 * min(len(b), a.shape[1]):
                b, a = compact(*combine([*before.values(), (b, a)]))
                for key in before:
                    for name in fold_sides(key):
                        del following[name]
            name_a, name_b = fold_names(module, self.round)
            following |= {name_a: a, name_b: b}
        return following

    def round_figures(self) -> dict[str, Any]:
        """Relative Frobenius error of the round's aggregation against the exact mean, by module."""
        errors = self._errors
        mean = math.sqrt(sum(e * e for e in errors.values()) / len(errors)) if errors else 0.0
        return {"rule": self.config.aggregation, "error": mean, "errors": errors}

    def outer_state(self) -> dict[str, Tensor]:
        """Moments of the server optimizer, fp32; empty for ``avg``."""
        return dict(self._moments)

    def load_outer_state(self, state: Mapping[str, Tensor]) -> None:
        """Take over what :meth:`outer_state` gave."""
        self._moments = dict(state)
