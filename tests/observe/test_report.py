"""The page is whole, self-contained and well-formed, whatever the log holds."""

from __future__ import annotations

import base64
import hashlib
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flower_geo.errors import StateError
from flower_geo.observe import write_report
from flower_geo.observe.report import build_page
from flower_geo.observe.summary import summarise
from tests.observe.fake_run import NAMES, fake_events, write_run

HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;\u202e\x1b[2J"
VOID = {"meta", "link", "br", "img", "input"}


class Checker(HTMLParser):
    """Notes elements and attributes, and fails on tags that do not match."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def check(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    return checker


def page(tmp_path: Path, events: list[dict[str, Any]], **options: Any) -> str:
    return write_report(write_run(tmp_path / "run", events, **options)).read_text(encoding="utf-8")


def words(html: str) -> str:
    """What a reader sees: no tags, no style, no script, single spaces."""
    visible = re.sub(r"<(style|script|title)>.*?</\1>", " ", html, flags=re.S)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", visible)).split())


def test_the_page_says_what_the_run_did(tmp_path: Path) -> None:
    html = page(tmp_path, fake_events())
    text = words(html)
    check(html)
    for expected in (
        "four-institutions",
        "DiLoCo",
        "Completed",
        "1.31 M trained parameters",
        "24 of 24",
        *NAMES,
        "corpus:shakespeare",
        "FedAvg, fp32 = 91 accepted answers × 2 ways × 4 bytes × 1,312,896 parameters",
        "1,820 local steps × 2 ways × 4 bytes × 1,312,896 parameters",
        "coordinator restarted",
        "update norm 48.1 is 31 times the running median",
        "3 missing",
        "outer-momentum",
        "and a just people, <b>all</b>",
        "metrics.jsonl",
        str((tmp_path / "run").resolve()),
    ):
        assert expected in text, expected
    # 91 x 8 x 1,312,896 and 1820 x 8 x 1,312,896 bytes
    assert "956 MB" in text
    assert "19.1 GB" in text


def test_the_curves_hold_every_value(tmp_path: Path) -> None:
    events = fake_events(sites=4, rounds=10)
    html = page(tmp_path, events)
    losses = [e["loss"] for e in events if e["event"] == "eval" and e["site"] == "*"]
    (whole,) = re.findall(r'data-name="all sites" data-points="([^"]*)"', html)
    assert [f"{loss:.3f}" for loss in losses] == re.findall(r"(\d\.\d{3})&quot;\]", whole)
    assert html.count('data-name="Mayo Clinic"') == 2  # held-out and training
    assert html.count('data-name="after local steps"') == 4


def test_nothing_is_loaded_from_anywhere(tmp_path: Path) -> None:
    html = page(tmp_path, fake_events())
    checker = check(html)
    for tag, name, value in checker.attributes:
        assert not name.startswith("on"), (tag, name)
        if name in ("src", "href", "srcset", "data", "action", "xlink:href"):
            assert re.fullmatch(r"data:,|[\w.]+/?", value), (tag, name, value)
    assert checker.tags.count("script") == 1
    assert not {"iframe", "object", "embed", "base", "img"} & set(checker.tags)
    style = re.findall(r"<style>(.*?)</style>", html, re.S)[0]
    assert "url(" not in style
    assert "@import" not in style


def test_the_policy_lets_only_our_script_run(tmp_path: Path) -> None:
    html = page(tmp_path, fake_events(rounds=1))
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    assert f"script-src 'sha256-{digest}'" in unescape(policy)
    assert "default-src 'none'" in unescape(policy)
    assert "unsafe-eval" not in policy


def test_names_from_outside_stay_text(tmp_path: Path) -> None:
    events = fake_events(sites=2, rounds=3, names=[HOSTILE, "b"])
    for event in events:
        for key, value in event.items():
            if isinstance(value, str) and key not in ("event", "site", "status"):
                event[key] = HOSTILE
    events += [
        {"event": "fault", "round": 1, "site": HOSTILE, "what": HOSTILE, "detail": HOSTILE},
        {"event": "site", "round": 3, "site": "b", "status": HOSTILE, "data": HOSTILE},
        {"event": "end", "status": HOSTILE, "reason": HOSTILE, "sample": HOSTILE},
    ]
    config = {HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE]}}
    html = page(tmp_path, events, config=config)
    checker = check(html)
    assert checker.tags.count("script") == 1
    assert "img" not in checker.tags
    assert not [name for _, name, _ in checker.attributes if name.startswith("on")]
    assert "\x1b" not in html
    assert "\u202e" not in html
    assert "<script>alert(1)</script>" in words(html)  # shown, as text
    widths = [value for tag, name, value in checker.attributes if name == "style"]
    assert all(re.fullmatch(r"width:[\d.]+%", value) for value in widths)


@pytest.mark.parametrize(("sites", "rounds"), [(1, 1), (1, 30), (4, 1), (7, 3), (32, 20)])
def test_any_size_of_run(tmp_path: Path, sites: int, rounds: int) -> None:
    html = page(tmp_path, fake_events(sites=sites, rounds=rounds))
    check(html)
    assert html.count('<th scope="row">hospital-') == max(0, sites - 4)
    assert html.count('class="chart small"') == sites
    assert len(html) < 2_000_000


@pytest.mark.parametrize("ended", [None, "failed", "stopped"])
def test_status_of_a_run_that_is_not_complete(tmp_path: Path, ended: str | None) -> None:
    text = words(page(tmp_path, fake_events(rounds=3, ended=ended)))
    if ended is None:
        assert "In progress" in text
        assert "No end is recorded yet" in text
        assert "Text from the trained model" not in text
    else:
        assert f"{ended.capitalize()}: only 1 of 4 sites answered in 3 attempts" in text


def test_a_run_cut_anywhere_has_a_page(tmp_path: Path) -> None:
    events = fake_events(sites=2, rounds=3)
    for length in range(len(events)):
        check(page(tmp_path, events[:length]))


def test_missing_and_odd_values(tmp_path: Path) -> None:
    nothing = {"event": "start"}
    text = words(page(tmp_path, [nothing], config=None))
    assert "Nothing recorded yet" in text
    assert "No site has answered yet" in text
    nan = float("nan")
    events = fake_events(sites=3, rounds=6)
    for i, event in enumerate(events):
        for key in event:
            if key.startswith(("loss", "train", "tokens", "seconds")) and i % 3:
                event[key] = nan if i % 2 else None
    html = page(tmp_path, events)
    check(html)
    assert not re.search(r"\bnan\b", words(html), re.I)


VALUES = st.one_of(
    st.none(),
    st.floats(),
    st.integers(),
    st.text(max_size=8),
    st.lists(st.text(max_size=3), max_size=2),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=2),
)
KEYS = [
    *("time", "run", "strategy", "rounds", "model", "parameters", "sites", "inner_steps"),
    *("round", "site", "status", "loss", "train_loss", "loss_before", "loss_after", "tokens"),
    *("seconds", "bytes_up", "bytes_down", "data", "accepted", "asked", "what", "detail"),
    *("reason", "sample", "model_dir", "codec_up", "resumed_from"),
]
KINDS = st.sampled_from(["start", "site", "round", "eval", "fault", "end"])


@given(
    events=st.lists(
        st.fixed_dictionaries({"event": KINDS}, optional=dict.fromkeys(KEYS, VALUES)), max_size=8
    ),
    config=st.dictionaries(st.text(max_size=5), VALUES, max_size=3),
)
def test_any_log_and_any_config_make_a_page(
    events: list[dict[str, Any]], config: dict[str, Any]
) -> None:
    check(build_page(summarise(events), config, Path("nowhere")))


def test_a_torn_log_and_a_broken_config_cost_no_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", fake_events(rounds=2))
    log = folder / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-20])
    (folder / "config.json").write_text('{"rounds": ')
    text = words(write_report(folder).read_text(encoding="utf-8"))
    assert "Configuration" not in text
    assert "2 of 2" in text


def test_places_name_only_what_is_there(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", fake_events(rounds=1))
    (folder / "model").mkdir()
    (folder / "checkpoints").mkdir()
    html = write_report(folder).read_text(encoding="utf-8")
    assert re.findall(r'<a href="([^"]*)"', html) == [
        *("model/", "metrics.jsonl", "checkpoints/", "config.json")
    ]


def test_writing_again_replaces_the_page_and_leaves_nothing_behind(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", fake_events(rounds=1))
    first = write_report(str(folder))
    assert first == folder / "report.html"
    write_report(folder)
    assert {p.name for p in folder.iterdir()} == {"metrics.jsonl", "config.json", "report.html"}


def test_errors_name_the_folder_and_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(StateError, match=r"no metrics.jsonl in .*nowhere; give the folder"):
        write_report(tmp_path / "nowhere")
    folder = write_run(tmp_path / "run", fake_events(rounds=1))
    (folder / "report.html").mkdir()
    with pytest.raises(StateError, match=r"cannot write .*report.html"):
        write_report(folder)
    assert not list(folder.glob(".report-*"))


def test_the_page_says_what_was_refused_and_why(tmp_path: Path) -> None:
    line = {
        "event": "site", "site": "a", "round": 3, "status": "refused", "reason": f"odd {HOSTILE}",
    }  # fmt: skip
    page = build_page(summarise([line]), {}, tmp_path)
    text = " ".join(check(page).text)
    assert "All answers not counted" in text and "odd <script>alert(1)</script>" in text
    assert "<script>alert(1)" not in page
