"""A real browser for pages, and what it shows of their tables."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1280,900")
CUT_OFF = """
const width = document.documentElement.clientWidth, cut = [];
for (const table of document.querySelectorAll("table")) {
  const box = table.getBoundingClientRect();
  let scrolls = /auto|scroll/.test(getComputedStyle(table).overflowX) && box.right <= width + 1;
  for (let around = table.parentElement; around && !scrolls; around = around.parentElement) {
    const how = getComputedStyle(around).overflowX, right = around.getBoundingClientRect().right;
    if (/auto|scroll/.test(how) && right <= width + 1) scrolls = true;
    else if (/hidden|clip/.test(how) && box.right > right + 1) break;
  }
  if (box.width && box.right > width + 1 && !scrolls) cut.push(table.innerText.slice(0, 60));
}
return {tables: document.querySelectorAll("table").length, wide: document.documentElement.scrollWidth > width, cut};
"""


@contextmanager
def chromium() -> Iterator[Any]:
    """Yield a headless Chromium that logs what it asks for and complains of; skip the test where there is none."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium, which drives the browser, is not installed")
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    driver = shutil.which("chromedriver")
    if browser is None or driver is None:
        pytest.skip("no Chromium with its chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def on_screen(browser: Any, address: str, width: int, colours: str = "light") -> Any:
    """Open a page on a screen of a width."""
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", screen)
    features = [{"name": "prefers-color-scheme", "value": colours}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(address)
    return browser


def cut_off(browser: Any, address: str, width: int) -> dict[str, Any]:
    """Return the number of tables of a page, the beginnings of those that end beyond the screen, and whether the page does."""
    found: dict[str, Any] = on_screen(browser, address, width).execute_script(CUT_OFF)
    return found
