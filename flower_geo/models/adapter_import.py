"""A folder with a LoRA adapter, read onto its base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError
from safetensors.torch import load_file

from flower_geo.errors import ModelError
from flower_geo.models.adapter import attach, load_adapter_state
from flower_geo.models.adapter_spec import spec_from_config
from flower_geo.models.build import first_line

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

__all__ = ["load_adapter"]


def load_adapter(model: PreTrainedModel, folder: str | Path) -> PeftModel:
    """Put a saved adapter on its base, in place.

    Args:
        model: the base it was trained on.
        folder: as ``export_adapter`` or PEFT writes it: adapter_config.json and
            adapter_model.safetensors.

    Raises:
        ModelError: a file is missing or damaged, or the adapter does not fit.
    """
    from peft import LoraConfig

    place = Path(folder)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        if not (place / name).is_file():
            raise ModelError(
                f"adapter folder {place} has no {name}; give a folder that a run or PEFT wrote"
            )
    try:
        values = json.loads((place / "adapter_config.json").read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get("peft_type") != "LORA":
            raise ValueError("it is no LoRA adapter")
        config = LoraConfig.from_pretrained(str(place))
        state = load_file(place / "adapter_model.safetensors")
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        raise ModelError(
            f"adapter folder {place} cannot be read: {first_line(error)}; write it again"
        ) from error
    peft = attach(model, spec_from_config(config), seed=0)
    load_adapter_state(peft, state)
    return peft
