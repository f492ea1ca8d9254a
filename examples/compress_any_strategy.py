"""The compression layer by itself: spec strings, error feedback, Flower records.

Run it from anywhere:

    python examples/compress_any_strategy.py
"""

from __future__ import annotations

import torch

from flower_geo.compression import ErrorFeedback, codec, pack, record_nbytes, unpack

SPECS = (
    "fp32",
    "bf16",
    "int8(block=256)",
    "int4(block=64)",
    "topk(density=0.03,chunk=4096)|int8(block=256)",
    "topk(density=0.0156,chunk=4096)|int2(block=64)",
)


def main() -> None:
    """Send twenty updates through each codec and see what arrives."""
    torch.manual_seed(0)
    updates = [{"layer.weight": torch.randn(256, 1024) * 1e-3} for _ in range(20)]
    given = torch.stack([update["layer.weight"] for update in updates]).sum(0)
    print(f"{'codec':50} {'bits a value':>12} {'error':>8} {'with feedback':>14}")
    for spec in SPECS:
        chosen, feedback = codec(spec), ErrorFeedback()
        plain, fed, nbytes = torch.zeros_like(given), torch.zeros_like(given), 0
        for update in updates:
            record = pack(update, chosen)  # a flwr ArrayRecord, ready for a Message
            nbytes += record_nbytes(record)
            plain += unpack(record)["layer.weight"]
            fed += unpack(pack(update, chosen, feedback=feedback))["layer.weight"]
            feedback.acknowledge()  # the update arrived: its residual counts
        bits = 8 * nbytes / (len(updates) * given.numel())
        errors = [float((sent - given).norm() / given.norm()) for sent in (plain, fed)]
        print(f"{spec:50} {bits:12.3f} {errors[0]:8.4f} {errors[1]:14.4f}")


if __name__ == "__main__":
    main()
