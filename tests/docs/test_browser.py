"""The site in Debian's chromium, from the disk: no errors, nothing from elsewhere, on a desktop and on a phone."""

from __future__ import annotations

import json
import urllib.parse
from pathlib import Path

import pytest

from harness import needs

ROOT = Path(__file__).parents[2]
PAGES = {
    "home": "index.html",
    "search": "search.html?q=preemption",
    "guide": "guides/plain.html",
    "reference": "api/fastckpt.html",
}
WIDTHS = {"desk": 1280, "phone": 390}
#: The most bytes of the home page with everything that it loads.
HOME = 300_000


@pytest.fixture(scope="module")
def browser():
    webdriver = needs.package("selenium.webdriver")
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = needs.tool("chromium", "chromium")
    # No host name is resolved, so nothing leaves the machine. Chromium's own sandbox does not run as root.
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--host-resolver-rules=MAP * ~NOTFOUND",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options, Service(needs.tool("chromedriver", "chromium-driver")))
    yield driver
    driver.quit()


def view(browser, address, width, scheme="light"):
    """Open an address, and return the addresses of all requests."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get_log("performance")
    browser.get(address)
    wait(browser, "return document.readyState === 'complete'")
    return requests(browser)


def requests(browser):
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [url for url in sent if not url.startswith("data:")]


def wait(browser, script):
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(browser, 60, poll_frequency=0.05).until(lambda driver: driver.execute_script(script))


def keep(browser, name):
    """Save a picture for people in target/site-pictures."""
    folder = ROOT / "target" / "site-pictures"
    folder.mkdir(parents=True, exist_ok=True)
    browser.save_screenshot(str(folder / f"{name}.png"))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("page", PAGES)
def test_page(site, browser, page, width):
    asked = view(browser, f"{site.as_uri()}/{PAGES[page]}", WIDTHS[width])
    if page == "search":
        wait(browser, "return document.querySelectorAll('#search-results li a').length >= 5")
        assert "Preemption" in browser.execute_script("return document.querySelector('#search-results').innerText")
    asked += requests(browser)
    assert asked
    assert [url for url in asked if not url.startswith(f"{site.as_uri()}/")] == []
    keep(browser, f"{page}-{width}")
    wide = browser.execute_script("return document.documentElement.scrollWidth")
    assert wide <= WIDTHS[width], "the page has to be moved sideways"
    assert [entry["message"] for entry in browser.get_log("browser")] == []
    if page == "home":
        weight = sum(Path(urllib.parse.urlsplit(url).path).stat().st_size for url in set(asked))
        assert weight < HOME, sorted(set(asked))


def test_errors_of_the_console_are_seen(site, browser):
    view(browser, f"{site.as_uri()}/index.html", 1280)
    browser.execute_script("const one = new Image(); one.src = 'nowhere.png'; document.body.append(one)")
    wait(browser, "return document.images[document.images.length - 1].complete")
    browser.execute_script("console.error('wrong')")
    said = " ".join(entry["message"] for entry in browser.get_log("browser"))
    assert "nowhere.png" in said
    assert "wrong" in said


def test_the_menu_of_a_phone(site, browser):
    view(browser, f"{site.as_uri()}/index.html", WIDTHS["phone"])
    left = "return document.querySelector('.sidebar-drawer').getBoundingClientRect().left"
    assert browser.execute_script(left) < 0
    browser.find_element("css selector", ".mobile-header label[for=__navigation]").click()
    wait(browser, f"{left} === 0")
    browser.find_element("link text", "Get started").click()
    wait(browser, "return document.title.startsWith('Get started')")


def test_light_and_dark(site, browser):
    shades = []
    for scheme in ("light", "dark"):
        view(browser, f"{site.as_uri()}/index.html", 1280, scheme)
        colour = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        shades.append(sum(map(int, colour.partition("(")[2].rstrip(")").split(",")[:3])))
        keep(browser, f"home-{scheme}")
    assert shades[0] > 600 > 200 > shades[1]
