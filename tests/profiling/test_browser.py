"""The pictures in a real browser: nothing is fetched, nothing throws, hovering explains."""

import re
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from browser import CHROMIUM, Browser

from clusterkv_ops.profiling.page import render_page
from clusterkv_ops.profiling.report import build_report

# The text of a page whose elements hide theirs in shadow trees.
DEEP_TEXT = """(function text(node) {
  return [...node.childNodes].map(child => child.nodeType === Node.TEXT_NODE ? child.data
    : text(child) + (child.shadowRoot ? text(child.shadowRoot) : '')).join(' ');
})(document.body).replace(/\\s+/g, ' ')"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.fixture(scope="module")
def browser():
    with Browser() as one:
        yield one


@pytest.fixture
def page(synthetic, tmp_path):
    timeline = synthetic("serial")[1]
    path = tmp_path / "report.html"
    path.write_text(render_page(build_report(timeline), timeline))
    return path


def centre_of(browser, selector):
    """Where the first such mark is in the window."""
    script = (
        f"(() => {{ const r = document.querySelector({selector!r}).getBoundingClientRect();"
        "return [r.x + r.width / 2, r.y + r.height / 2]; })()"
    )
    return browser.evaluate(script)


def remote_requests(browser):
    local = ("file:", "data:", "about:", "blob:", "http://127.0.0.1:")
    return [url for url in browser.requests if not url.startswith(local)]


def test_report_is_self_contained_and_hovering_names_work_time_and_bytes(browser, page):
    browser.open(f"file://{page}")
    assert browser.evaluate("document.querySelector('h1').textContent").startswith("Prefill")
    browser.move_to(*centre_of(browser, "rect.f-offload[data-tip*='Memcpy']"))
    tip = browser.wait_for("document.getElementById('tip').textContent")
    assert re.search(r"Memcpy DtoH \(Device -> Pinned\)\noffload, \d+ us, layer 0, 33.6 MB", tip)
    assert browser.errors == []
    assert browser.requests[-1].startswith("file:")
    assert remote_requests(browser) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_follows_the_preferred_theme_and_the_button_changes_it(browser, page, scheme):
    def brightness():
        colour = browser.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(map(int, re.findall(r"\d+", colour)[:3])) / 3

    browser.emulate(scheme)
    browser.open(f"file://{page}")
    assert (brightness() > 128) == (scheme == "light")
    browser.evaluate("document.getElementById('theme').click()")
    assert (brightness() > 128) == (scheme == "dark")
    browser.emulate("light")


def test_phases_are_told_apart_in_greyscale(browser, page):
    """Two phases of the same grey must differ in pattern."""
    browser.open(f"file://{page}")
    script = """(() => {
      const phases = [...document.querySelectorAll('.legend span')].map(e => e.innerText.trim());
      const style = getComputedStyle(document.documentElement);
      return phases.filter(p => style.getPropertyValue('--' + p)).map(p => {
        const path = document.querySelector('#p-' + p + ' path');
        return [p, style.getPropertyValue('--' + p), path ? path.getAttribute('d') : ''];
      });
    })()"""
    looks = browser.evaluate(script)
    assert len(looks) >= 6
    for i, (left, colour, pattern) in enumerate(looks):
        for right, other_colour, other_pattern in looks[:i]:
            difference = abs(grey(colour) - grey(other_colour))
            assert difference > 25 or pattern != other_pattern, (left, right)


def grey(colour):
    red, green, blue = (int(colour.strip()[i : i + 2], 16) for i in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.fixture(scope="module")
def tensorboard(synthetic, tmp_path_factory):
    """Address of a TensorBoard over two runs, with the offline form of torch-tb-profiler."""
    pytest.importorskip("torch_tb_profiler", reason="the profile extra is not installed")
    from clusterkv_ops.profiling.event_files import write_run

    logdir = tmp_path_factory.mktemp("logs")
    for kind in ("overlapped", "serial"):
        timeline = synthetic(kind)[1]
        write_run(build_report(timeline), timeline, logdir / kind)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "clusterkv_ops.profile", "serve", "--logdir", str(logdir)]
    command += ["--port", str(port), "--offline-plugin"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        wait_until_served(f"{address}/data/plugins_listing", server)
        yield address
    finally:
        server.terminate()
        server.wait(timeout=30)


def wait_until_served(url, server, seconds=120):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert server.poll() is None, "TensorBoard ended"
        try:
            return urllib.request.urlopen(url, timeout=5).read()
        except OSError:
            time.sleep(0.5)
    raise TimeoutError(url)


def test_tab_shows_a_run_and_compares_two(browser, tensorboard):
    browser.errors.clear()
    browser.open(f"{tensorboard}/#clusterkv")
    tab = "document.querySelector('iframe').contentDocument"
    report = f"{tab}.querySelector('iframe').contentDocument"
    headline = browser.wait_for(f"{report}.querySelector('h1').textContent")
    assert "100 % hidden" in headline
    names = browser.evaluate(f"[...{tab}.querySelector('select').options].map(o => o.value)")
    assert names == ["overlapped", "serial"]
    browser.evaluate(
        f"(() => {{ const other = {tab}.querySelectorAll('select')[1];"
        "other.value = 'serial'; other.onchange(); })()"
    )
    title = "overlapped against serial"
    browser.wait_for(f"{report}.querySelector('h1').textContent === {title!r}")
    assert browser.errors == []
    assert remote_requests(browser) == []


def test_scalars_are_plotted(browser, tensorboard):
    browser.open(f"{tensorboard}/?show=scalars#scalars")
    for tag in ("cache/hit_rate", "hidden_pct/prefill/clustering", "exposed_ms/decode/recall"):
        browser.wait_for(f"{DEEP_TEXT}.includes('tag: clusterkv/{tag} ')")


def test_trace_view_of_the_stock_plugin_works_offline(browser, tensorboard):
    browser.errors.clear()
    browser.open(f"{tensorboard}/data/plugin/pytorch_profiler/index.html")
    browser.wait_for("document.body.innerText.includes('Step Time Breakdown')")
    browser.wait_for("document.querySelectorAll('svg rect').length > 5")
    choose_view(browser, "Trace")
    frame = "document.querySelector('iframe').contentWindow"
    viewer = f"{frame}.document.querySelector('#trace-viewer')"
    browser.wait_for(f"{viewer}.model.getAllThreads().length >= 4")
    threads = browser.evaluate(f"{viewer}.model.getAllThreads().map(thread => thread.name)")
    assert {"stream 7 ", "stream 20 ", "stream 24 "} <= set(threads)
    assert browser.errors == []
    assert remote_requests(browser) == []


def choose_view(browser, name):
    """Opens the plugin's list of views and takes one."""
    browser.evaluate(
        "[...document.querySelectorAll('[role=button]')]"
        ".find(e => e.innerText.trim() === 'Overview')"
        ".dispatchEvent(new MouseEvent('mousedown', {bubbles: true}))"
    )
    option = f"[...document.querySelectorAll('[role=option]')].find(e => e.innerText === {name!r})"
    browser.wait_for(f"Boolean({option})")
    browser.evaluate(f"{option}.click()")
