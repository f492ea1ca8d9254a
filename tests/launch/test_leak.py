from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flower_geo.data import load_tokenizer
from flower_geo.errors import CodecSpecError, ConfigError, DataError, FlowerGeoError, ModelError
from flower_geo.launch.leak import (
    HEADS,
    LeakOptions,
    LeakReport,
    check_leak,
    leak_rows,
    risk,
    write_report,
)
from flower_geo.models import AdapterSpec, adapter_state, attach, build_model, export_adapter
from flower_geo.models.leak import Leak


def leak(cut: int, noise: float, share: float) -> Leak:
    return Leak(cut, noise, 100, share / 2, share, None, None)


def report(*leaks: Leak, guess: float = 0.03) -> LeakReport:
    return LeakReport(LeakOptions("m", "d"), "fp32", 4096, guess, False, [*leaks])


@pytest.fixture
def options(tmp_path: Path) -> LeakOptions:
    words = "the whole of a site's text is what the people of this town wrote about themselves"
    (tmp_path / "site.txt").write_text("\n\n".join(f"{words} {n}." for n in range(60)))
    (tmp_path / "public.txt").write_text("\n\n".join(f"{n} other {words}." for n in range(60)))
    return LeakOptions(
        "llama-pico", str(tmp_path / "site.txt"), [0, 1], [0.0, 50.0],
        public=str(tmp_path / "public.txt"), tokens=64, length=16, candidates=64,
        codec="int8(block=64)",
    )  # fmt: skip


def test_a_text_comes_back_through_the_codec_and_noise_hides_it(options: LeakOptions) -> None:
    made = check_leak(options)
    assert [(one.cut, one.noise) for one in made.leaks] == [(0, 0), (0, 50), (1, 0), (1, 50)]
    assert all(one.tokens == 64 and one.linear is not None for one in made.leaks)
    quiet, loud = made.leaks[2], made.leaks[3]
    assert quiet.best > 0.95 and loud.best < 0.5
    assert made.codec == "int8(block=64)" and made.vocabulary == 4096 and made.random_weights
    assert 0 <= made.guess < 0.3
    assert check_leak(options).leaks == made.leaks


def test_a_site_with_an_adapter(options: LeakOptions, tmp_path: Path) -> None:
    tokenizer: Any = load_tokenizer()
    plain = build_model("llama-pico", seed=0, vocab_size=len(tokenizer))
    peft: Any = attach(plain, AdapterSpec(rank=2), seed=1)
    drawn = torch.Generator().manual_seed(0)
    state = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=drawn)
        for name, tensor in adapter_state(peft).items()
    }
    export_adapter(peft, state, tokenizer, tmp_path / "adapter", {})
    options = replace(options, cuts=[1], noises=[0.0], candidates=4096, tokens=16, codec="fp32")
    adapted = replace(options, adapter=str(tmp_path / "adapter"))
    (plain_leak,), (hidden,), (known,) = (
        check_leak(one).leaks for one in (options, adapted, replace(adapted, knows_adapter=True))
    )
    assert plain_leak.best == known.best == 1.0 > hidden.best


def test_nothing_is_left_behind(
    options: LeakOptions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    check_leak(replace(options, cuts=[0], noises=[0.0], replay=False))
    assert not [*place.iterdir()]


def test_the_table_has_a_row_a_cut_and_level() -> None:
    rows = leak_rows(report(leak(1, 0.1, 0.5)))
    assert rows == [("1", "0.1", "25.0 %", "50.0 %", "–", "–", "50.0 %")]
    assert len(rows[0]) == len(HEADS)


@pytest.mark.parametrize(
    ("share", "said"),
    [
        (0.97, "reads the text (97 % of the tokens at cut 1 and noise 0;"),
        (0.6, "reads most of the text"),
        (0.2, "reads parts of the text"),
        (0.04, "reads hardly more than a guess"),
    ],
)
def test_the_risk_in_plain_words(share: float, said: str) -> None:
    line = risk(report(leak(1, 0.0, share), leak(2, 0.5, 0.01)))
    assert said in line and "at best 1 %, at cut 2 and noise 0.5" in line
    assert ("Treat the cloud" in line) is (share >= 0.5)
    assert "\n" not in line and "tried" not in line


def test_a_replay_of_some_tokens_only_says_so() -> None:
    made = report(leak(1, 0.0, 0.2))
    some = replace(made, options=replace(made.options, candidates=100))
    assert risk(some).endswith("tries all and reads more.") and "100 of 4,096 tokens" in risk(some)
    assert "tried" not in risk(replace(some, options=replace(some.options, replay=False)))


def test_the_figures_as_json(tmp_path: Path) -> None:
    made = report(leak(1, 0.0, 0.8))
    write_report(made, tmp_path / "leak.json")
    values = json.loads((tmp_path / "leak.json").read_text())
    assert values["leaks"] == [
        {"cut": 1, "noise": 0.0, "tokens": 100, "nearest": 0.4, "dictionary": 0.8,
         "linear": None, "replay": None, "best": 0.8}
    ]  # fmt: skip
    assert values["options"]["model"] == "m" and values["risk"] == risk(made)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model": "llama-pica"}, FlowerGeoError, "llama-pica"),
        ({"data": "corpus:sotus"}, DataError, "sotu"),
        ({"codec": "int9"}, CodecSpecError, "int9"),
        ({"cuts": [2]}, ModelError, "leave none"),
        ({"noises": [-1.0]}, ConfigError, "activation noise"),
        ({"tokens": 8}, ConfigError, "rows of 16"),
        ({"adapter": "nowhere"}, ModelError, "adapter_config.json"),
        ({"length": 4096, "tokens": 4096}, FlowerGeoError, "."),
    ],
    ids=["model", "data", "codec", "cut", "noise", "tokens", "adapter", "long"],
)
def test_wrong_options_are_one_line(
    options: LeakOptions, changes: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as caught:
        check_leak(replace(options, **changes))
    assert "\n" not in str(caught.value)
