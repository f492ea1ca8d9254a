"""Instructions of the coordinator's own, on which it evaluates what it has made."""

from __future__ import annotations

from typing import Any

from flower_geo.config import FedAvgLoRAConfig
from flower_geo.data.instructions import (
    InstructionCorpus,
    parse_instructions,
    prepare_instructions,
)
from flower_geo.errors import DataError
from flower_geo.evaluation.figures import instruction_figures
from flower_geo.resilience import RunFolder

__all__ = ["ServerSet"]

#: Share held out of the shipped categories, as the sites hold it out.
_SHIPPED = 0.1


class ServerSet:
    """See the module text.

    Of a file every row is asked; of the shipped categories, which the sites train on,
    only what every site holds out.

    Args:
        config: names it, in ``server_data``.
        tokenizer: the run's.

    Raises:
        DataError: it cannot be used.
    """

    def __init__(self, config: FedAvgLoRAConfig, tokenizer: Any) -> None:
        self._config = config
        self._tokenizer = tokenizer
        spec = "builtin:instructions" if config.server_data == "builtin" else config.server_data
        try:
            shipped = parse_instructions(spec).kind == "builtin"
            self.data: InstructionCorpus = prepare_instructions(
                spec, tokenizer, seq_len=config.seq_len,
                cache_dir=RunFolder.resolve(config.run_dir, config.run_name) / "server-data",
                completion_only=config.completion_only, held_out=_SHIPPED if shipped else 1.0,
            )  # fmt: skip
        except DataError as error:
            raise DataError(f"server-data: {error}") from error

    def figures(self, model: Any) -> dict[str, float]:
        """Loss, accuracy and, where asked for, exact match of a model on it."""
        config = self._config
        return instruction_figures(
            model, self._tokenizer, self.data, batch_size=config.batch_size,
            max_tokens=config.eval_tokens or None, answers=config.exact_match,
        )  # fmt: skip
