"""The report in a real browser: nothing complains, every chart is drawn, nothing hangs over the edge."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fimaq.data.demo import demo_calibration, demo_model
from fimaq.report.write import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
WIDTHS = (360, 1280)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("no Chromium with its driver: install chromium and chromedriver to run this test")
    with tempfile.TemporaryDirectory() as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        for flag in (*FLAGS.split(), f"--user-data-dir={profile}"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))  # given a path, it fetches none
        try:
            yield driver
        finally:
            driver.quit()


@pytest.fixture(scope="module")
def report(demo_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    images = demo_calibration(128)  # enough for disagreements, whose pictures are to be seen
    out = tmp_path_factory.mktemp("browser") / "report.html"
    return write_report(demo_run, out, model=demo_model(), images=images, device="cpu")


@pytest.fixture(params=WIDTHS)
def opened(request: pytest.FixtureRequest, browser: Any, report: Path) -> Any:
    """The page in a window of a phone's or a desk's width, everything unfolded."""
    size = {"width": request.param, "height": 800, "deviceScaleFactor": 1, "mobile": request.param < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.get(report.as_uri())
    # The page itself may run no script; this is the driver's.
    browser.execute_script("document.querySelectorAll('details').forEach(d => { d.open = true; })")
    return browser


def test_the_console_stays_empty(opened: Any) -> None:
    assert opened.get_log("browser") == []
    assert opened.find_element("id", "repeat").is_displayed()


def test_every_chart_is_drawn(opened: Any) -> None:
    boxes = opened.execute_script(
        "return [...document.querySelectorAll('svg')].map(s => {"
        " const b = s.getBoundingClientRect(), shapes = 'path,rect,polyline,circle,polygon',"
        " marks = [...s.querySelectorAll(shapes)]"
        ".filter(m => { const r = m.getBoundingClientRect(); return r.width + r.height > 0; });"
        " return [b.width, b.height, marks.length]; })"
    )
    assert len(boxes) > 30
    assert all(width > 10 and height > 10 and marks > 0 for width, height, marks in boxes)


def test_pictures_are_decoded(opened: Any) -> None:
    sizes = opened.execute_script("return [...document.images].map(i => [i.complete, i.naturalWidth])")
    assert sizes
    assert all(complete and width > 0 for complete, width in sizes)


def test_nothing_hangs_over_the_edge(opened: Any) -> None:
    width, inner = opened.execute_script("return [document.documentElement.scrollWidth, window.innerWidth]")
    assert width <= inner


def test_texts_of_charts_stay_inside_them(opened: Any) -> None:
    outside = opened.execute_script(
        "return [...document.querySelectorAll('svg.chart text')].filter(t => {"
        " const a = t.getBoundingClientRect(), b = t.ownerSVGElement.getBoundingClientRect();"
        " return a.left < b.left - 1 || a.right > b.right + 1 || a.bottom > b.bottom + 1; })"
        ".map(t => t.textContent)"
    )
    assert outside == []


def test_the_style_is_applied_under_the_policy(opened: Any) -> None:
    table = opened.execute_script("return getComputedStyle(document.querySelector('table')).borderCollapse")
    assert table == "collapse"
