"""Fine-tuning a LoRA adapter on instructions: the base is frozen and never leaves the disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flower_geo.aggregation.adapter_parts import (
    folds_in,
    is_fold,
    module_of,
    modules_in,
    sent,
    sliced,
    stays,
    trained,
)
from flower_geo.compression import Growing, content_hash
from flower_geo.config import FedAvgLoRAConfig, names_of
from flower_geo.data import Cursor, load_tokenizer, tokenizer_hash
from flower_geo.data.instructions import (
    InstructionCorpus,
    chat_template_of,
    collate,
    files_of,
    instruction_spec,
    pad_id_of,
    parse_instructions,
    prepare_instructions,
)
from flower_geo.errors import ConfigError
from flower_geo.evaluation.figures import instruction_figures
from flower_geo.models import (
    AdapterSpec,
    adapter_state,
    load_adapter_state,
    set_trained,
)
from flower_geo.models.adapted import adapted_base
from flower_geo.models.adapter import initial_a
from flower_geo.models.adapter_choice import adapter_spec, site_spec
from flower_geo.models.folding import FoldedBase
from flower_geo.site.identity import cache_folder, node_number
from flower_geo.site.tasks.base import Alone
from flower_geo.site.tasks.comparison import AdapterComparison
from flower_geo.site.tasks.kept import KeptByFiles, Stamps, file_stamps
from flower_geo.training import InnerLoop, TrlLoop
from flower_geo.training.settings import inner_config

__all__ = ["Adapters", "initial_adapter"]


@dataclass(frozen=True)
class _Bench:
    """A base with an adapter on it, as the last request of this process left them."""

    model: Any
    base: FoldedBase
    whole: dict[str, Tensor]
    initial_hash: str
    tokenizer: Any
    tokenizer_hash: str
    identity: str


#: The newest bench by all it depends on; only one, since a model is large.
_benches: dict[tuple[Any, ...], _Bench] = {}


def _bench(config: FedAvgLoRAConfig, device: str, whole: AdapterSpec, spec: AdapterSpec) -> _Bench:
    """Base and adapter; ``whole`` is the coordinator's spec, ``spec`` the site's."""
    key = (
        config.model, config.seed, config.tokenizer, config.seq_len, config.quantise, device,
        repr(whole), repr(spec),
    )  # fmt: skip
    if key not in _benches:
        _benches.clear()
        _benches[key] = _built(config, device, whole, spec)
    return _benches[key]


def _built(config: FedAvgLoRAConfig, device: str, whole: AdapterSpec, spec: AdapterSpec) -> _Bench:
    made = adapted_base(config, spec, load_tokenizer, chat_template_of, device)
    initial = initial_adapter(adapter_state(made.model), whole, config.seed)
    if config.quantise == "none":
        made.model.to(torch.device(device))
    return _Bench(
        made.model, FoldedBase(made.model), initial, content_hash(initial), made.tokenizer,
        tokenizer_hash(made.tokenizer), made.identity,
    )  # fmt: skip


class Adapters(Alone):
    """See ``tasks.base.Task``.

    Args:
        config: the run's configuration under the site's own choices, rank and alpha
            left as the coordinator's.
        node_config: the site's.
        device: torch device.
        total_steps: of the whole run.
        phase: is told what the site is about to do.
    """

    def __init__(
        self,
        config: FedAvgLoRAConfig,
        node_config: Mapping[str, Any],
        device: str,
        total_steps: int,
        phase: Callable[[str], None],
    ) -> None:
        self.growing: Growing = is_fold
        self.config = config
        self.device = device
        self.total_steps = total_steps
        self.whole = adapter_spec(config)
        self.spec = site_spec(self.whole, _rank(node_config), _alpha(node_config))
        phase("model")
        self.bench: Any = self._bench(device)
        self.model = self.bench.model
        self.initial_hash = self.bench.initial_hash
        self.identity = self.bench.identity
        self.tokenizer_hash = self.bench.tokenizer_hash
        phase("data")
        self.data = _data(config, node_config, self.bench)
        self.data_name, self.data_fingerprint = self.data.name, self.data.fingerprint
        self.sequences = len(self.data.train)
        self.pad = pad_id_of(self.bench.tokenizer)
        self._round = 0
        self._own = names_of(config.personal)
        self.comparison: AdapterComparison | None = self._compared()

    def _bench(self, device: str) -> Any:
        """Model and tokenizer, kept from request to request."""
        return _bench(self.config, device, self.whole, self.spec)

    def _compared(self) -> AdapterComparison | None:
        return AdapterComparison(self)

    def initial(self) -> dict[str, Tensor]:
        """The fresh adapter at the coordinator's rank."""
        return dict(self.bench.whole)

    def schema(self) -> dict[str, Tensor]:
        """The adapter's names and shapes at the coordinator's rank."""
        whole: dict[str, Tensor] = self.bench.whole
        return whole

    def sizes(self) -> dict[str, float]:
        """Examples of both parts, and what was left out or cut."""
        report = self.data.report
        return {
            "train-examples": float(len(self.data.train)),
            "held-out-examples": float(len(self.data.held_out)),
            "truncated": float(report.truncated), "dropped": float(sum(report.dropped.values())),
        }  # fmt: skip

    def load(
        self,
        base: Mapping[str, Tensor],
        round: int,
        personal: Callable[[], Mapping[str, Tensor]],
    ) -> None:
        """Fold what is to be folded, and take the adapter at this site's rank and scale."""
        self._round = round
        self.bench.base.hold(folds_in(base))
        mine = self.mine(base)
        if self._own:
            mine |= {name: tensor for name, tensor in personal().items() if name in mine}
        load_adapter_state(self.model, mine)
        set_trained(self.model, lambda name: trained(name, self.config.aggregation, round))

    def mine(self, base: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The adapter of a version at this site's rank and scale."""
        state = self._at_my_rank({n: t for n, t in base.items() if not is_fold(n)})
        return self._scaled(state, to_site=True)

    def _at_my_rank(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        ranks = {m: self.spec.rank_of(m) for m in map(module_of, state) if m}
        return sliced(state, ranks)

    def _scaled(self, state: Mapping[str, Tensor], *, to_site: bool) -> dict[str, Tensor]:
        """B in units of this site's scale, or back in those of the coordinator's."""
        found = dict(state)
        for name, tensor in state.items():
            module = module_of(name)
            if module and name.endswith(".lora_B.weight"):
                ours, theirs = self.spec.scale_of(module), self.whole.scale_of(module)
                if ours != theirs:
                    found[name] = tensor * (theirs / ours if to_site else ours / theirs)
        return found

    def _sends(self, name: str) -> bool:
        return sent(name, self.config.aggregation, self._round, self._own)

    def trained_from(self, base: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What this round trains of the version, at this site's rank."""
        return self._at_my_rank({name: t for name, t in base.items() if self._sends(name)})

    def local(self) -> dict[str, Tensor]:
        """The same as it is now, in the coordinator's scale."""
        return self.sent(adapter_state(self.model))

    def sent(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What is sent of an adapter's state, in the coordinator's scale."""
        return self._scaled({n: t for n, t in state.items() if self._sends(n)}, to_site=False)

    def personal(self) -> dict[str, Tensor]:
        """Tensors that match a personal pattern, in this site's scale."""
        if not self._own:
            return {}
        state = adapter_state(self.model)
        return {name: tensor for name, tensor in state.items() if stays(name, self._own)}

    def loop(self, prox_mu: float | None = None) -> InnerLoop:
        """A loop over what this round trains; ``prox_mu`` is the configuration's by default."""
        prox = self.config.prox_mu if prox_mu is None else prox_mu
        settings = replace(inner_config(self.config, self.total_steps), prox_mu=prox)
        kind = TrlLoop if self.config.inner_loop == "trl" else InnerLoop
        return kind(self.model, settings)

    def batches(self, cursor: Cursor) -> Callable[[], dict[str, Tensor]]:
        """Batches of examples from where the cursor stands."""

        def following() -> dict[str, Tensor]:
            rows = cursor.next_indices(self.config.batch_size)
            batch = collate([self.data.train[int(row)] for row in rows], self.pad)
            return {name: tensor.to(self.device) for name, tensor in batch.items()}

        return following

    def held_out(self) -> dict[str, float]:
        """Loss a token, token accuracy, and exact match where it is asked for."""
        config = self.config
        return instruction_figures(
            self.model, self.bench.tokenizer, self.data, batch_size=config.batch_size,
            max_tokens=config.eval_tokens or None, answers=config.exact_match,
        )  # fmt: skip


def initial_adapter(state: dict[str, Tensor], whole: AdapterSpec, seed: int) -> dict[str, Tensor]:
    """The fresh adapter as the coordinator has it, whatever rank this site's ``state`` has."""
    for module, (a, b) in modules_in(state).items():
        rank = whole.rank_of(module)
        state[a] = initial_a(seed, module, rank, state[a].shape[1])
        state[b] = torch.zeros(state[b].shape[0], rank)
    return state


def _rank(node_config: Mapping[str, Any]) -> int | None:
    value = node_config.get("rank")
    if value is not None and (type(value) is not int or value < 1):
        raise ConfigError(f"node-config rank={value!r} is no whole number of 1 or more")
    return value


def _alpha(node_config: Mapping[str, Any]) -> float | None:
    value = node_config.get("alpha")
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"node-config alpha={value!r} is no number above 0")
    return float(value)


#: Conversations opened by this process.
_opened: KeptByFiles[InstructionCorpus] = KeptByFiles()


def _data(
    config: FedAvgLoRAConfig, node_config: Mapping[str, Any], bench: _Bench
) -> InstructionCorpus:
    """The site's conversations, opened once a process as long as their files stay as they are."""
    partition = node_number(node_config, "partition-id", 0)
    total = node_number(node_config, "num-partitions", partition + 1)
    spec = instruction_spec(config.data, node_config, partition, total)
    cache = cache_folder(node_config)
    return _opened.get(
        # The identity names the chat template and the special tokens too.
        (
            spec, str(cache), bench.tokenizer_hash, bench.identity, config.seq_len,
            config.completion_only, config.packing,
        ),
        lambda: _stamps(spec),
        lambda: prepare_instructions(
            spec, bench.tokenizer, seq_len=config.seq_len, cache_dir=cache,
            completion_only=config.completion_only, packing=config.packing,
        ),
    )  # fmt: skip


def _stamps(spec: str) -> Stamps | None:
    """Of a spec's files; None where there are none to look at."""
    files = files_of(parse_instructions(spec))
    return None if files is None else file_stamps(files)
