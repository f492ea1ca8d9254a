"""Cutting a causal language model: bottom at the site, middle in the cloud, top at the site.

A part is Hugging Face's own model with the layers of the other parts bypassed:
no code of a model is copied, and names, indices and the config stay as they are.
"""

from __future__ import annotations

from flower_geo.models.split.cut import LAYOUTS, Cut, Layout, Role, check_cut
from flower_geo.models.split.noise import noise_generator, noised
from flower_geo.models.split.part import (
    SplitPart,
    attach_part,
    split_part,
    split_parts,
    tied_names,
)
from flower_geo.models.split.sizes import PartSize, part_sizes
from flower_geo.models.split.states import merge_states

__all__ = [
    "LAYOUTS",
    "Cut",
    "Layout",
    "PartSize",
    "Role",
    "SplitPart",
    "attach_part",
    "check_cut",
    "merge_states",
    "noise_generator",
    "noised",
    "part_sizes",
    "split_part",
    "split_parts",
    "tied_names",
]
