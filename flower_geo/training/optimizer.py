"""The optimizer of a site: built, and its state flattened to named tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn

from flower_geo.errors import TrainingError
from flower_geo.training.schedule import InnerConfig

__all__ = ["adopted", "build_optimizer", "decays", "flat_state", "load_flat_state"]

#: AdamW's state of one parameter.
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = "step"


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies: to matrices, not to biases and norms."""
    parts = name.lower().split(".")
    norm = any("norm" in part or part.startswith("ln_") for part in parts)
    return parameter.ndim >= 2 and parts[-1] != "bias" and not norm


def build_optimizer(
    parameters: Mapping[str, nn.Parameter], config: InnerConfig, *, fused: bool
) -> torch.optim.Optimizer:
    """AdamW, or SGD without momentum, with weight decay where ``decays`` says so.

    Args:
        parameters: what is trained, by name.
        config: of the inner loop.
        fused: take torch's single-kernel step.  On CPUs it differs from the plain
            step in the last bit, so it is for devices that wait on kernel launches.
    """
    decayed = [p for name, p in parameters.items() if decays(name, p)]
    plain = [p for name, p in parameters.items() if not decays(name, p)]
    groups = [
        {"params": params, "weight_decay": decay}
        for params, decay in ((decayed, config.weight_decay), (plain, 0.0))
        if params
    ]
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, fused=fused or None)
    return torch.optim.AdamW(
        groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=fused or None
    )


def adopted(
    model: nn.Module,
    config: InnerConfig,
    known: Mapping[str, nn.Parameter],
    optimizer: torch.optim.Optimizer | None,
    *,
    fused: bool,
    also: Collection[str] = (),
) -> tuple[dict[str, nn.Parameter], torch.optim.Optimizer]:
    """The optimizer over all that is, was or is said to be trained; state goes along.

    Args:
        model: whose parameters require a gradient where they are trained now.
        config: of the inner loop.
        known: what ``optimizer`` was built over; empty with None.
        optimizer: the one so far.
        fused: see ``build_optimizer``.
        also: names of idle parameters to take in.

    Raises:
        TrainingError: nothing is trained.
    """
    found = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad or name in known or name in also
    }
    if not any(parameter.requires_grad for parameter in found.values()):
        raise TrainingError("the model has no trainable parameter; unfreeze some of it")
    same = found.keys() == known.keys() and all(found[name] is known[name] for name in found)
    if optimizer is not None and same:
        return dict(known), optimizer
    fresh = build_optimizer(found, config, fused=fused)
    for name in found.keys() & known.keys():
        if optimizer is not None and known[name] in optimizer.state:
            fresh.state[found[name]] = optimizer.state[known[name]]
    return found, fresh


def flat_state(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Tensor]:
    """CPU copies of the optimizer's tensors, keyed ``<what>/<parameter>``."""
    flat: dict[str, Tensor] = {}
    for name, parameter in parameters.items():
        for what in (*MOMENTS, STEP):
            value = optimizer.state.get(parameter, {}).get(what)
            if value is not None:
                flat[f"{what}/{name}"] = value.detach().to("cpu", copy=True).contiguous()
    return flat


def load_flat_state(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    flat: Mapping[str, Tensor],
) -> None:
    """Replace the optimizer's state by ``flat``; a parameter it does not name starts anew.

    Nothing is changed unless everything fits.

    Raises:
        TrainingError: an entry belongs to no parameter or optimizer here, has
            another shape, or a parameter's state is incomplete.
    """
    adamw = isinstance(optimizer, torch.optim.AdamW)
    device_steps = any(group.get("fused") for group in optimizer.param_groups)
    loaded: dict[Tensor, dict[str, Tensor]] = {}
    for key, value in flat.items():
        what, _, name = key.partition("/")
        if not adamw or what not in (*MOMENTS, STEP) or name not in parameters:
            raise _misfit(f"{key} belongs to nothing this optimizer trains")
        parameter = parameters[name]
        wanted = torch.Size() if what == STEP else parameter.shape
        if value.shape != wanted:
            raise _misfit(f"{key} has shape {tuple(value.shape)}, not {tuple(wanted)}")
        kept = value.to(
            device=parameter.device if what != STEP or device_steps else "cpu",
            dtype=torch.float32 if what == STEP else parameter.dtype,
            copy=True,
        )
        if what != STEP:
            # Memory order of the parameter, as in state the optimizer made itself.
            kept = torch.empty_like(parameter.detach()).copy_(kept)
        loaded.setdefault(parameter, {})[what] = kept
    for name, parameter in parameters.items():
        found = loaded.get(parameter)
        if found is not None and len(found) != len(MOMENTS) + 1:
            raise _misfit(f"the state of {name} is incomplete")
    optimizer.state.clear()
    optimizer.state.update(loaded)


def _misfit(what: str) -> TrainingError:
    return TrainingError(
        f"the saved optimizer state does not fit this model: {what}; "
        "use the state of the same model and optimizer, or start without one"
    )
