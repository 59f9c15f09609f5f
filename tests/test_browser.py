"""index.html in a real browser: Debian's chromium, without a window, driven by selenium."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from runs import HOSTILE, broken, large, run_of

from autograd_conformance.claims import Claim
from autograd_conformance.reports.html import index
from autograd_conformance.verdicts import Result, Verdict

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: the page is not looked at in a browser")
pytestmark = [
    pytest.mark.skipif(not (BROWSER and DRIVER), reason="no chromium and chromedriver: the page is not looked at"),
    pytest.mark.xdist_group("browser"),
]

Open = Callable[..., Any]


def _start(*, script: bool = True) -> Any:
    options = webdriver.ChromeOptions()
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1280,900",
    ):
        options.add_argument(word)
    options.binary_location = str(BROWSER)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    if not script:
        options.add_experimental_option("prefs", {"profile.managed_default_content_settings.javascript": 2})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """One browser for all tests."""
    driver = _start()
    yield driver
    driver.quit()


@pytest.fixture
def show(chromium: Any, tmp_path: Path) -> Open:
    """Opens the page of some results; every test ends without a word in the console of the browser."""

    def opened(*results: Result, after: str = "", page: str = "") -> Any:
        path = tmp_path / "index.html"
        path.write_text(page or index(*run_of(*(results or _results()))), encoding="utf-8")
        chromium.get("about:blank")
        chromium.get(path.as_uri() + after)
        assert chromium.get_log("browser") == []
        return chromium

    return opened


def _results() -> list[Result]:
    return [
        broken("grad.adds"),
        Result("grad.adds", "lazy", Verdict.HOLDS),
        Result("grad.layout", "cpu", Verdict.HOLDS),
        Result("grad.layout", "lazy", Verdict.UNSUPPORTED, reason="lazy lacks storage"),
        Result("leaf.flag", "cpu", Verdict.HOLDS),
        Result("leaf.flag", "lazy", Verdict.UNPROVEN, expected=False),
    ]


def _visible(driver: Any) -> list[str]:
    code = "return [...document.querySelectorAll('.claim')].filter(c => c.offsetParent).map(c => c.querySelector('article').id)"
    return sorted(driver.execute_script(code))


def _do(driver: Any, code: str) -> Any:
    return driver.execute_script(code)


def _set(driver: Any, selector: str, value: str) -> None:
    """As a user would: the value, then the event."""
    code = "const e = document.querySelector(arguments[0]); e.type === 'checkbox' ? e.checked = true : e.value = arguments[1]; "
    driver.execute_script(code + "e.dispatchEvent(new Event('input', {bubbles: true}))", selector, value)


def _wait(driver: Any, code: str) -> None:
    end = time.monotonic() + 10
    while not _do(driver, f"return {code}"):
        assert time.monotonic() < end, code
        time.sleep(0.05)


FILTERS = [
    ("#text", "LAYOUT grad", ["grad.layout"]),
    ("#text", "promise leaf", ["leaf.flag"]),
    ("#area", "leaf", ["leaf.flag"]),
    ("#device", "1", ["grad.adds", "grad.layout", "leaf.flag"]),
    ("[value=broken]", "true", ["grad.adds"]),
    ("[value=unsupported]", "true", ["grad.layout"]),
    ("#strange", "true", ["grad.adds", "leaf.flag"]),
    ("#text", "nothing like it", []),
]


@pytest.mark.parametrize(("selector", "value", "left"), FILTERS)
def test_each_filter_leaves_what_fits(show: Open, selector: str, value: str, left: list[str]) -> None:
    """And says how many are left."""
    driver = show()
    assert _visible(driver) == ["grad.adds", "grad.layout", "leaf.flag"]
    _set(driver, selector, value)
    assert _visible(driver) == left
    assert _do(driver, "return document.querySelector('#left').textContent") == f"{len(left)} of 3 claims"
    assert _do(driver, "return !document.querySelector('#none').hidden") == (not left)


def test_filters_join_and_are_kept_in_the_address(show: Open) -> None:
    """Verdict and device concern the same cell; the address opens the same view again; Escape clears all."""
    driver = show()
    _set(driver, "#device", "1")
    _set(driver, "[value=broken]", "true")
    assert _visible(driver) == []
    _set(driver, "#device", "0")
    assert _visible(driver) == ["grad.adds"]
    driver.get(driver.current_url)
    assert "verdict=broken" in driver.current_url
    assert _visible(driver) == ["grad.adds"]
    _key(driver, "Escape")
    _wait(driver, "document.querySelector('#left').textContent === '3 of 3 claims'")


def _key(driver: Any, key: str) -> None:
    code = f"document.activeElement.dispatchEvent(new KeyboardEvent('keydown', {{key: '{key}', bubbles: true}}))"
    _do(driver, code)


def test_deep_link_opens_its_claim(show: Open) -> None:
    """In an address, and by a click within the page, even if a filter hides the claim."""
    driver = show(after="#leaf.flag")
    opened = "return [...document.querySelectorAll('.claim[open] article')].map(a => a.id)"
    assert _do(driver, opened) == ["leaf.flag"]
    _set(driver, "#area", "leaf")
    _do(driver, "document.querySelector('.answer a[href=\"#grad.adds\"]').click()")
    _wait(driver, "document.querySelectorAll('.claim[open]').length === 2")
    assert "grad.adds" in _visible(driver)


def test_keyboard_is_enough(show: Open) -> None:
    """j and k go from claim to claim, Enter opens, a slash leads to the search."""
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    driver = show()
    ActionChains(driver).send_keys("j", "j", "k", "j", Keys.ENTER).perform()
    _wait(driver, "document.querySelector('.claim[open] article')?.id === 'grad.adds'")
    ActionChains(driver).send_keys("/", "leaf").perform()
    _wait(driver, "document.querySelector('#left').textContent === '1 of 3 claims'")


def test_copy_button_copies_the_script(show: Open) -> None:
    """The whole script lands in the clipboard, and a screen reader is told."""
    driver = show(after="#grad.adds")
    driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
    )
    _wait(driver, "document.querySelectorAll('.claim[open] .copy').length === 3")
    _do(driver, "document.querySelector('.code').open = true")
    driver.find_element("css selector", ".code .copy").click()
    _wait(driver, "document.querySelector('#told').textContent === 'Copied'")
    copied = driver.execute_async_script("navigator.clipboard.readText().then(arguments[0])")
    assert copied == _do(driver, "return document.querySelector('.script').textContent")
    assert "raise SystemExit(far)" in copied


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read(show: Open, scheme: str) -> None:
    """In both schemes each text has a contrast of 4.5 and more to what lies behind it."""
    driver = show(after="#grad.adds")
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    )
    poor = _do(driver, CONTRAST)
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert poor == []


CONTRAST = """
const parts = (c) => (c.match(/[\\d.]+/g) || []).map(Number);
const light = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
  .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
const back = (e) => { for (; e; e = e.parentElement) { const c = parts(getComputedStyle(e).backgroundColor);
  if (c.length < 4 || c[3] > 0) return c; } return parts(getComputedStyle(document.body).backgroundColor); };
const poor = new Set();
const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (texts.nextNode()) {
  const e = texts.currentNode.parentElement;
  if (!texts.currentNode.textContent.trim() || !e.offsetParent || e.closest('svg, script, option, select')) continue;
  const [a, b] = [light(parts(getComputedStyle(e).color)), light(back(e))].sort((x, y) => y - x);
  if ((a + .05) / (b + .05) < 4.5) poor.add(e.className + ': ' + texts.currentNode.textContent.trim().slice(0, 30));
}
return [...poor];
"""


@pytest.mark.parametrize("width", [390, 1280])
def test_page_is_as_wide_as_the_window(show: Open, width: int) -> None:
    """Nothing sticks out, on a phone neither."""
    driver = show(after="#grad.adds")
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    wide = _do(driver, "return document.documentElement.scrollWidth")
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    assert wide <= width


def test_page_is_complete_without_script(tmp_path: Path) -> None:
    """Claims, panels and links are there; a deep link opens its claim; nothing is shown that would need a script."""
    path = tmp_path / "index.html"
    path.write_text(index(*run_of(*_results())), encoding="utf-8")
    driver = _start(script=False)
    try:
        driver.get(f"{path.as_uri()}#grad.adds")
        assert driver.find_element("css selector", "article .due").is_displayed()
        assert driver.find_element("css selector", "svg.graph").is_displayed()
        assert not driver.find_element("id", "filters").is_displayed()
        assert len(driver.find_elements("css selector", ".claim")) == 3
    finally:
        driver.quit()


def test_hostile_report_runs_nothing(show: Open) -> None:
    """No script of a report runs, no element comes out of a text, and the filters still work."""
    bad = broken("grad.adds", HOSTILE, seen=HOSTILE, due=HOSTILE, because=HOSTILE, probe=HOSTILE)
    run, claims = run_of(bad, Result("leaf.flag", HOSTILE, Verdict.HOLDS), notes=(HOSTILE,), failure=HOSTILE)
    claims["grad.adds"] = Claim("grad.adds", HOSTILE, (HOSTILE,), HOSTILE, False)
    driver = show(page=index(run, claims), after="#grad.adds")
    assert driver.title == "Autograd conformance: torch 2.13.0+cpu"
    assert not driver.find_elements("css selector", "img, iframe")
    _set(driver, "#text", "leaf.flag")
    assert _visible(driver) == ["leaf.flag"]


def test_large_report_opens_at_once(show: Open) -> None:
    """300 claims on 10 devices with 200 counterexamples: there within two seconds, and filtered in a blink."""
    page = index(*large())
    times = "const t = performance.getEntriesByType('navigation')[0]; return t.loadEventEnd - t.startTime"
    took = min(_do(show(page=page), times) for _ in range(3))  # a busy machine is slow at times
    driver = show(page=page)
    filtered = _do(
        driver,
        "const t = performance.now(); const e = document.querySelector('#text'); e.value = 'claim-1'; "
        "e.dispatchEvent(new Event('input', {bubbles: true})); document.body.offsetHeight; return performance.now() - t",
    )
    assert took < 2000, took
    assert filtered < 500, filtered
