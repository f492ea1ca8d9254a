"""A frozen base in 8 or 4 bits, where bitsandbytes runs on the machine."""

from __future__ import annotations

import importlib.util
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from flower_geo.errors import ModelError
from flower_geo.models.build import build_model, first_line, quiet

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["QUANTISED", "Quantised", "load_base"]

Quantised = Literal["none", "int8", "int4"]

#: What ``quantise`` may be.
QUANTISED = ("none", "int8", "int4")

#: What transformers, accelerate and bitsandbytes raise where the machine does not do.
_ERRORS = (ImportError, RuntimeError, ValueError, OSError, AttributeError, NotImplementedError)


def load_base(
    spec: str,
    *,
    seed: int,
    vocab_size: int | None = None,
    max_seq_len: int | None = None,
    quantise: Quantised = "none",
    device: str | torch.device | None = None,
) -> PreTrainedModel:
    """Build or load the base an adapter is trained on.

    "none" gives what ``build_model`` gives: fp32, on the CPU.  "int8" and "int4"
    (NF4) store the linear layers' weights in that many bits, but for the output
    layer, and put the model on ``device``; whatever is not stored so stays fp32.
    A quantised base takes no fold.

    Args:
        spec: see ``build_model``.
        seed: see ``build_model``.
        vocab_size: see ``build_model``.
        max_seq_len: see ``build_model``.
        quantise: "none", "int8" or "int4".
        device: of a quantised base; None = the first GPU, else the CPU.

    Raises:
        ModelError: as ``build_model``; or bitsandbytes is not installed, or does
            not run here.
    """
    if quantise not in QUANTISED:
        raise ModelError(f"quantise={quantise!r} is unknown; use one of {', '.join(QUANTISED)}")
    if quantise != "none" and importlib.util.find_spec("bitsandbytes") is None:
        raise ModelError(
            f"a base in {quantise} needs bitsandbytes; run pip install bitsandbytes, "
            "or set quantise=none"
        )

    def build() -> PreTrainedModel:
        return build_model(spec, seed=seed, vocab_size=vocab_size, max_seq_len=max_seq_len)

    return build() if quantise == "none" else _quantised(build, spec, quantise, device)


def _quantised(
    build: Callable[[], PreTrainedModel],
    spec: str,
    quantise: Quantised,
    device: str | torch.device | None,
) -> PreTrainedModel:
    """The same model loaded anew: bitsandbytes quantises while weights are read.

    By way of a folder for every kind of spec: transformers quantises no named
    model and no GGUF file by itself.
    """
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    place = torch.device(device or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    config: Any = BitsAndBytesConfig
    compute = torch.bfloat16 if place.type == "cuda" else torch.float32
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": compute}
    wanted = config(load_in_8bit=True) if quantise == "int8" else config(load_in_4bit=True, **nf4)
    model = build()
    loss_type = model.loss_type
    try:
        with tempfile.TemporaryDirectory(prefix="flower-geo-base-") as folder, quiet():
            model.save_pretrained(folder)
            del model
            with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
                # Notes of the libraries about each other.
                warnings.simplefilter("ignore", category=FutureWarning)
                warnings.simplefilter("ignore", category=UserWarning)
                loaded = AutoModelForCausalLM.from_pretrained(
                    Path(folder),
                    dtype=torch.float32,
                    quantization_config=wanted,
                    device_map={"": place},
                    use_safetensors=True,
                    trust_remote_code=False,
                    local_files_only=True,
                )
    except _ERRORS as error:
        raise ModelError(
            f"bitsandbytes cannot hold {spec} in {quantise} on {place}: {first_line(error)}; "
            "set quantise=none"
        ) from error
    base = cast("PreTrainedModel", loaded)
    base.loss_type = loss_type
    base.train()
    return base
