"""Write the configuration tables of README.md from the configuration itself.

python tools/config_table.py           write it
python tools/config_table.py --check   exit 1 when README.md is behind
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from annotated_types import Ge, Gt, Le, Lt

from flower_geo.config import FIXED_KEYS, CommonConfig, kebab, load_app

REPO = Path(__file__).resolve().parents[1]
README = REPO / "README.md"
#: Marks around the table of each app.
TABLES = {"diloco": "configuration", "fedavg_lora": "adapters", "split": "split"}
#: The app whose table an app's own is beside.
BESIDE = {"fedavg_lora": "diloco", "split": "fedavg_lora"}

#: Limits no one meets by accident are left out.
SHOWN = 100_000

GROUPS = {
    "The run": ("strategy", "run_name", "run_dir", "rounds", "seed"),
    "Model and data": (
        "model", "tokenizer", "data", "seq_len", "eval_tokens", "eval_every", "sample_prompt",
        "sample_tokens",
    ),
    "At a site": (
        "batch_size", "grad_accum", "inner_steps", "inner_seconds", "inner_optimizer", "inner_lr",
        "warmup_steps", "schedule", "min_lr_ratio", "weight_decay", "clip_norm", "precision",
        "threads", "keep_optimizer", "snapshot_steps",
    ),
    "The outer step": ("outer_lr", "outer_momentum", "outer_nesterov", "weight_by"),
    "The wire": (
        "codec_up", "codec_down", "dense_rounds", "dense_last_rounds", "dense_codec",
        "codec_ladder", "comm_target",
        "downlink_quantile", "downlink_decay", "error_feedback", "feedback_decay",
        "feedback_dtype",
    ),
    "Rounds and faults": (
        "quorum", "grace", "deadline", "sites_per_round", "over_provision", "min_sites",
        "wait_for_sites", "strict_start", "max_staleness", "staleness_weight", "balance",
        "max_retries", "max_norm_factor", "max_loss_factor", "max_claim_factor",
        "checkpoint_keep",
    ),
}  # fmt: skip


LORA_GROUPS = {
    "The adapter": (
        "rank", "alpha", "rslora", "dropout", "target_modules", "rank_pattern", "alpha_pattern",
        "modules_to_save", "quantise",
    ),
    "Aggregation": (
        "aggregation", "personal", "fold_rank", "server_optimizer", "server_lr",
        "server_momentum", "server_beta2", "server_tau",
    ),
    "Training and data": ("inner_loop", "prox_mu", "completion_only", "packing"),
    "Figures and output": ("exact_match", "local_baseline", "server_data", "merge"),
}  # fmt: skip

SPLIT_GROUPS = {
    "The cut": ("mode", "cut_bottom", "cut_top", "align_every"),
    "The stream": (
        "in_flight", "codec_activations", "codec_gradients", "delta_coding", "activation_noise",
        "stream_host", "stream_bind", "stream_port", "stream_certificate", "stream_key",
        "stream_deadline",
    ),
}  # fmt: skip

OWN_GROUPS = {"fedavg_lora": LORA_GROUPS, "split": SPLIT_GROUPS}


def own_table(app: str) -> str:
    """The keys that an app has beyond the one it builds on, and the ones it presets otherwise.

    Raises:
        ValueError: a key is in no group.
    """
    config, groups = load_app(REPO / "apps" / app).config, OWN_GROUPS[app]
    plain = load_app(REPO / "apps" / BESIDE[app]).config
    common = set(type(config).model_fields) & set(type(plain).model_fields)
    listed = [name for names in groups.values() for name in names]
    if set(listed) != set(type(config).model_fields) - common:
        odd = set(listed) ^ (set(type(config).model_fields) - common)
        raise ValueError(f"the groups of {app} and its configuration differ in {odd}")
    other = [
        name
        for name in type(plain).model_fields
        if name in common and getattr(config, name) != getattr(plain, name)
    ]
    return _rows(config, {**groups, "Other defaults": tuple(other)})


def table(app: str = "diloco") -> str:
    """The table as Markdown, with an app's defaults; every key stands in it once.

    Raises:
        ValueError: a key is in no group.
    """
    config = load_app(REPO / "apps" / app).config
    model = type(config)
    known = set(model.model_fields)
    listed = [name for names in GROUPS.values() for name in names]
    if set(listed) != known or len(listed) != len(known):
        raise ValueError(f"GROUPS and the configuration differ in {set(listed) ^ known}")
    return _rows(config, GROUPS)


def _rows(config: CommonConfig, groups: Mapping[str, tuple[str, ...]]) -> str:
    model = type(config)
    lines = ["| key | default | what it is |", "|---|---|---|"]
    for group, names in groups.items():
        lines.append(f"| **{group}** | | |")
        for name in names:
            field = model.model_fields[name]
            fixed = " (fixed for a run)" if kebab(name) in FIXED_KEYS else ""
            lines.append(
                f"| `{kebab(name)}` | {_value(getattr(config, name))} | {_about(field)}{fixed} |"
            )
    return "\n".join(lines)


def _value(default: object) -> str:
    text = str(default).lower() if isinstance(default, bool) else str(default)
    # A bar ends a cell, within code too.
    return f"`{text}`".replace("|", "\\|")


def _about(field: object) -> str:
    parts = []
    if description := getattr(field, "description", None):
        parts.append(description.replace("|", "\\|"))
    choices = getattr(getattr(field, "annotation", None), "__args__", ())
    if choices and all(isinstance(choice, str) for choice in choices) and len(choices) > 1:
        parts.append("one of " + ", ".join(f"`{choice}`" for choice in choices))
    limits = []
    for limit in getattr(field, "metadata", ()):
        for kind, sign in ((Ge, "≥"), (Gt, ">"), (Le, "≤"), (Lt, "<")):
            if isinstance(limit, kind) and getattr(limit, kind.__name__.lower()) < SHOWN:
                limits.append(f"{sign} {getattr(limit, kind.__name__.lower()):g}")
    if limits:
        parts.append(" and ".join(limits))
    return "; ".join(parts)


def main() -> int:
    """Write or check."""
    text = wanted = README.read_text(encoding="utf-8")
    for app, mark in TABLES.items():
        begin, end = f"<!-- {mark}: begin -->", f"<!-- {mark}: end -->"
        before, rest = wanted.split(begin)
        _, after = rest.split(end)
        made = table(app) if app == "diloco" else own_table(app)
        wanted = f"{before}{begin}\n{made}\n{end}{after}"
    if "--check" in sys.argv:
        if wanted != text:
            print("README.md's configuration tables are behind: run python tools/config_table.py")
            return 1
        return 0
    README.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
