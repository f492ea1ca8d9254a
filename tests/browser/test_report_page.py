"""The report in a real browser: curves, no complaint, no request, light, dark, wide, narrow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from flower_geo.observe import write_report
from tests.browser.chromium import Browser, Page, artefact, open_browser
from tests.observe.fake_run import NAMES, fake_events, write_run

pytestmark = pytest.mark.browser

SIZES = {"wide": (1280, 900), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser(chromium: str) -> Iterator[Browser]:
    with open_browser(chromium) as running:
        yield running


def assert_quiet(page: Page, url: str) -> None:
    assert page.problems == []
    assert page.requests == [url]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_curves_are_drawn_and_fit(tmp_path: Path, browser: Browser, size: str, dark: bool) -> None:
    url = write_report(write_run(tmp_path, fake_events())).as_uri()
    width, height = SIZES[size]
    page = browser.open(url, width=width, height=height, dark=dark)
    page.screenshot(artefact(f"report-{size}-{'dark' if dark else 'light'}.png"))
    assert_quiet(page, url)
    assert page.evaluate("document.title") == "four-institutions – flower_geo"
    # Every curve has a length on the screen, and every chart shows its points.
    charts = page.evaluate(
        """[...document.querySelectorAll('.chart')].map(chart => ({
            curves: [...chart.querySelectorAll('path.curve')].map(p => p.getTotalLength()),
            points: [...chart.querySelectorAll('.point')].length,
            width: chart.querySelector('svg.figure').getBoundingClientRect().width,
        }))"""
    )
    assert [len(chart["curves"]) for chart in charts] == [5, 5, 4, 1, 1, 1, 1]
    for chart in charts:
        assert all(length > 100 for length in chart["curves"])
        assert chart["points"] >= 20
        assert 150 < chart["width"] < width
    names = page.evaluate(
        "[...document.querySelectorAll('.sites th[scope=row]')].map(e => e.innerText)"
    )
    assert names == list(NAMES)
    # Nothing sticks out sideways; only tables may scroll, within themselves.
    assert page.evaluate("document.documentElement.scrollWidth") == width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(15, 18, 22)" if dark else "rgb(246, 247, 249)")


def test_labels_keep_their_size_on_a_phone(tmp_path: Path, browser: Browser) -> None:
    url = write_report(write_run(tmp_path, fake_events())).as_uri()
    page = browser.open(url, width=390, height=844)
    sizes = page.evaluate(
        "[...document.querySelectorAll('.tick')].map(t => t.getBoundingClientRect().height)"
    )
    assert len(sizes) > 20
    assert min(sizes) > 10
    # Neighbouring labels of an axis do not run into each other.
    overlaps = page.evaluate(
        """[...document.querySelectorAll('svg.figure')].flatMap(svg => {
            const boxes = [...svg.querySelectorAll('.tick.x')].map(t => t.getBoundingClientRect());
            return boxes.slice(1).filter((box, i) => box.left < boxes[i].right);
        }).length"""
    )
    assert overlaps == 0


def test_values_show_under_the_pointer_and_the_arrow_keys(tmp_path: Path, browser: Browser) -> None:
    url = write_report(write_run(tmp_path, fake_events(rounds=10))).as_uri()
    page = browser.open(url)
    tip = "document.querySelector('.tip')"
    assert page.evaluate(f"{tip}.hidden") is True
    box = page.evaluate(
        "(b => [b.x, b.y, b.width])(document.querySelector('svg.figure').getBoundingClientRect())"
    )
    page.move_pointer(box[0] + 0.62 * box[2], box[1] + 60)
    shown = page.evaluate(f"{tip}.innerText").split("\n")
    assert shown[0] == "rounds committed 6"
    assert shown[1] == "all sites"
    assert set(NAMES) <= set(shown)
    page.move_pointer(2, 2)
    assert page.evaluate(f"{tip}.hidden") is True
    page.evaluate("document.querySelector('svg.figure').focus()")
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft"):
        page.call("Input.dispatchKeyEvent", type="keyDown", key=key)
    assert page.evaluate(f"{tip}.innerText").startswith("rounds committed 7")
    page.call("Input.dispatchKeyEvent", type="keyDown", key="Escape")
    assert page.evaluate(f"{tip}.hidden") is True
    assert_quiet(page, url)


def test_without_scripts_the_page_is_whole(tmp_path: Path, browser: Browser) -> None:
    url = write_report(write_run(tmp_path, fake_events(rounds=5))).as_uri()
    page = browser.open(url, scripts=False)
    page.screenshot(artefact("report-without-scripts.png"))
    document = page.call("DOM.getDocument")["root"]["nodeId"]
    found = page.call("DOM.querySelectorAll", nodeId=document, selector="path.curve")["nodeIds"]
    titles = page.call("DOM.querySelectorAll", nodeId=document, selector=".point > title")[
        "nodeIds"
    ]
    assert len(found) == 18
    assert len(titles) > 100  # the browser's own hover texts
    assert page.requests == [url]


def test_hostile_names_run_nothing(tmp_path: Path, browser: Browser) -> None:
    taken = "document.title='taken'"
    evil = f"</title></script><script>{taken}</script><img src='http://127.0.0.1:9/'"
    evil += f' onerror="{taken}">'
    events = fake_events(sites=2, rounds=3, names=[evil, "'\"><svg onload=document.title=1>"])
    for event in events:
        for key in ("run", "model", "data", "sample", "reason", "codec_up"):
            if key in event:
                event[key] = evil
    url = write_report(write_run(tmp_path, events, config={evil: evil})).as_uri()
    page = browser.open(url)
    assert_quiet(page, url)
    assert page.evaluate("document.title").startswith("</title>")
    assert page.evaluate("document.querySelectorAll('img, [onload], [onerror]').length") == 0
    assert page.evaluate("document.querySelectorAll('script').length") == 1


@pytest.mark.parametrize(
    ("name", "sites", "rounds", "ended"),
    [("one-site", 1, 1, "completed"), ("32-sites", 32, 60, "completed"), ("going", 4, 3, None)],
)
def test_other_runs(
    tmp_path: Path, browser: Browser, name: str, sites: int, rounds: int, ended: str | None
) -> None:
    events = fake_events(sites=sites, rounds=rounds, ended=ended)
    url = write_report(write_run(tmp_path, events)).as_uri()
    page = browser.open(url)
    page.screenshot(artefact(f"report-{name}.png"))
    assert_quiet(page, url)
    assert page.evaluate("document.querySelectorAll('.chart.small').length") == sites
    assert page.evaluate("document.documentElement.scrollWidth") == 1280


def test_the_helper_sees_errors_and_requests(tmp_path: Path, browser: Browser) -> None:
    """A quiet page proves nothing unless a loud one is heard."""
    loud = tmp_path / "loud.html"
    loud.write_text(
        "<!doctype html><script>console.error('one', 2); setTimeout(() => { throw Error('late') })"
        "</script><img src=missing.png>"
    )
    page = browser.open(loud.as_uri())
    heard = "\n".join(page.problems)
    assert "console.error: one 2" in heard
    assert "Error: late" in heard
    assert "ERR_FILE_NOT_FOUND" in heard
    assert page.requests == [loud.as_uri(), (tmp_path / "missing.png").as_uri()]
    with pytest.raises(RuntimeError, match="nonsense"):
        page.evaluate("nonsense")
