"""The pages in a real browser: games move, curves grow, keys play; no error is logged, and nothing leaves the machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import uvicorn

from redline.run.agent import load_agent
from redline.web.play_page import PlayPage
from redline.web.replay import record_games, write_replay
from redline.web.serve import listen, make_app
from redline.web.watch_page import WatchPage

playwright = pytest.importorskip("playwright.sync_api")
BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium: apt-get install chromium"),
    pytest.mark.timeout(240),
]
ARGUMENTS = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-sync"
WAIT = 60_000  # milliseconds that anything may take on a busy machine
SHOTS = os.environ.get("REDLINE_SCREENSHOTS")  # folder to keep pictures of the pages in


class Served:
    """A page on a port of its own, served by a thread."""

    def __init__(self, page: Any) -> None:
        self.page, listener = page, listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        app = make_app(page, "127.0.0.1", listener.getsockname()[1])
        config = uvicorn.Config(app, log_level="critical", lifespan="on", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=lambda: asyncio.run(self.server.serve(sockets=[listener])), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture(scope="module")
def runs(snake_run: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("watched")
    return [Path(shutil.copytree(snake_run, folder / name)) for name in ("first", "second")]


@pytest.fixture(scope="module")
def servers(runs: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Served]]:
    """All servers at once: their players load torch at the same time."""
    scores = str(tmp_path_factory.mktemp("scores") / "scores.json")
    job = {"options": {}, "seed": 3, "against": None, "trust": False, "scores": scores}
    servers = {
        "watch": Served(WatchPage(runs, games=4)),
        "snake": Served(PlayPage(job | {"env": "snake", "against": str(runs[0])})),
        "tetris": Served(PlayPage(job | {"env": "tetris", "options": {"height": "8"}})),
    }
    yield servers
    for server in servers.values():
        server.stop()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        profile = tmp_path_factory.mktemp("profile")
        context = driver.chromium.launch_persistent_context(
            str(profile),
            executable_path=BROWSER,
            headless=True,
            args=ARGUMENTS.split(),
            viewport={"width": 1280, "height": 800},
        )
        context.set_default_timeout(WAIT)
        yield context
        context.close()


class Tab:
    """A tab whose errors and requests are kept, and checked at its end."""

    def __init__(self, browser: Any, url: str) -> None:
        self.page, self.errors, self.hosts = browser.new_page(), [], set()
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).hostname))
        self.page.on("websocket", lambda socket: self.hosts.add(urlsplit(socket.url).hostname))
        self.page.goto(url)

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, kind: Any, *_: object) -> None:
        self.page.close()
        if kind is None:
            assert self.errors == []
            assert self.hosts <= {"127.0.0.1", "", None}  # none: files, and pictures inside messages


def keep(page: Any, name: str) -> None:
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/{name}.png")


def picture(page: Any, selector: str) -> str:
    return str(page.eval_on_selector(selector, "canvas => canvas.toDataURL()"))


def wait_until(page: Any, expression: str, argument: Any = None) -> None:
    """Ask again and again: the page forbids the strings of code with which playwright's own waiting works."""
    end = time.monotonic() + WAIT / 1000
    while not page.evaluate(expression, argument):
        assert time.monotonic() < end, f"still not true: {expression}"
        page.wait_for_timeout(30)


def test_the_wall_moves_curves_grow_and_runs_are_overlaid(
    browser: Any, servers: dict[str, Served], runs: list[Path]
) -> None:
    with Tab(browser, servers["watch"].url) as page:
        page.wait_for_selector(".tile canvas[data-drawn]")
        wait_until(page, "document.querySelectorAll('.tile').length === 8")
        before = picture(page, ".tile canvas")
        wait_until(page, "before => document.querySelector('.tile canvas').toDataURL() !== before", before)
        assert page.inner_text(".run h2") == "first"
        assert "Bottleneck." in page.inner_text(".run")

        chart = "[data-series=score] canvas"
        page.wait_for_selector(chart)
        points = int(page.get_attribute(chart, "data-points"))
        with (runs[0] / "metrics.jsonl").open("a") as file:
            steps = 10_000
            for number in range(5):
                record = {
                    "env_steps": steps + number,
                    "seconds": 100.0 + number,
                    "score": 3.0,
                    "env_steps_per_second": 1.0,
                }
                file.write(json.dumps(record) + "\n")
        wait_until(page, f"Number(document.querySelector('{chart}').dataset.points) >= {points + 5}")
        assert "first: 3 now" in page.get_attribute(chart, "aria-label")
        assert "second: " in page.get_attribute(chart, "aria-label")  # both in one chart

        page.click("#chips button >> nth=1")
        assert page.locator("#chips button").nth(1).get_attribute("aria-pressed") == "false"
        wait_until(page, f"!document.querySelector('{chart}').getAttribute('aria-label').includes('second')")
        assert page.locator(".wall:visible").count() == 1
        page.keyboard.press("2")
        wait_until(page, f"document.querySelector('{chart}').getAttribute('aria-label').includes('second')")
        page.click("#by-time")
        page.click("summary >> nth=0")
        assert "the game is played on the device" in page.inner_text("#settings details >> nth=0")
        keep(page, "watch")


def test_enlarge_pause_step_and_speed(browser: Any, servers: dict[str, Served]) -> None:
    with Tab(browser, servers["watch"].url) as page:
        page.click(".tile >> nth=1")
        page.wait_for_selector("dialog[open] .outputs div")
        assert page.inner_text("#outputs-title") == "Action probabilities"
        assert page.locator(".outputs div").count() == 3
        assert "straight on" in page.inner_text("#outputs")
        assert page.eval_on_selector("dialog canvas.main", "canvas => canvas.clientWidth") >= 480
        keep(page, "enlarged")
        page.keyboard.press("Escape")
        wait_until(page, "!document.querySelector('dialog').open")

        page.evaluate("document.activeElement.blur()")
        page.keyboard.press(" ")
        wait_until(page, "document.querySelector('#pause').textContent === 'Play'")
        time.sleep(0.5)  # a frame that was on its way
        steps = "[...document.querySelectorAll('.tile .dim')].map(e => e.textContent).join()"
        still = page.evaluate(steps)
        time.sleep(1.0)
        assert page.evaluate(steps) == still
        page.keyboard.press(".")
        wait_until(page, f"still => {steps} !== still", still)
        page.keyboard.press("+")
        wait_until(page, "document.querySelector('#speed').value === '15'")
        page.click("#pause")
        wait_until(page, "document.querySelector('#pause').textContent === 'Pause'")
        frames = "Number(document.querySelector('.tile canvas').dataset.drawn)"
        drawn = page.evaluate(frames)
        wait_until(page, f"{frames} > {drawn} + 3")


def test_a_phone_shows_everything_without_scrolling_sideways(browser: Any, servers: dict[str, Served]) -> None:
    for name in ("watch", "snake", "tetris"):
        with Tab(browser, "about:blank") as page:
            page.set_viewport_size({"width": 360, "height": 740})
            page.goto(servers[name].url)
            page.wait_for_selector("canvas[data-drawn]")
            page.wait_for_timeout(300)
            width = "document.documentElement.scrollWidth"
            assert page.evaluate(width) <= 360, name
            keep(page, f"phone-{name}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_follow_the_system_and_the_button(browser: Any, servers: dict[str, Served], scheme: str) -> None:
    with Tab(browser, "about:blank") as page:
        page.emulate_media(color_scheme=scheme)
        page.goto(servers["watch"].url)
        theme = "document.documentElement.dataset.theme"
        assert page.evaluate(theme) == scheme
        colours = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
        page.click("#theme")
        assert page.evaluate(theme) != scheme
        page.evaluate("localStorage.clear()")
        assert colours != page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )


def test_everything_has_a_name_for_a_screen_reader(browser: Any, servers: dict[str, Served]) -> None:
    nameless = """() => [...document.querySelectorAll('button, select, canvas[role=img], dialog, [role=group]')]
        .filter(e => !e.hidden && e.offsetParent !== null)
        .filter(e => !(e.getAttribute('aria-label') || e.textContent.trim() || (e.labels && e.labels.length)))
        .map(e => e.outerHTML.slice(0, 80))"""
    for name in ("watch", "snake"):
        with Tab(browser, servers[name].url) as page:
            page.wait_for_selector("canvas[data-drawn]")
            assert page.evaluate(nameless) == []
            assert page.get_attribute("html", "lang") == "en"
            page.keyboard.press("Tab")
            assert page.evaluate("document.activeElement.tagName") == "BUTTON"


def test_snake_is_played_by_keys_beside_an_agent(browser: Any, servers: dict[str, Served]) -> None:
    with Tab(browser, servers["snake"].url) as page:
        page.wait_for_selector("#player-0 canvas[data-drawn]")
        page.wait_for_selector("#player-1 canvas[data-drawn]")
        wait_until(page, "document.querySelector('#player-0 .cover strong').textContent === 'Ready'")
        assert page.inner_text("#opponent") == "first"
        # The same seed: both games start on the same board.
        assert picture(page, "#player-0 canvas.main") == picture(page, "#player-1 canvas.main")
        start = picture(page, "#player-0 canvas.main")
        page.keyboard.press("ArrowUp")
        wait_until(page, "document.querySelector('#player-0 .cover').hidden")
        wait_until(page, "start => document.querySelector('#player-0 canvas.main').toDataURL() !== start", start)
        keep(page, "play-snake")
        wait_until(
            page, "document.querySelector('#player-0 .cover strong').textContent === 'Game over'"
        )  # into the wall
        page.keyboard.press("Enter")
        wait_until(page, "document.querySelector('#player-0 .cover strong').textContent === 'Ready'")
        page.keyboard.press("a")
        wait_until(page, "document.querySelector('#player-0 .cover').hidden")
        page.keyboard.press("p")
        wait_until(
            page, "['Paused', 'Game over'].includes(document.querySelector('#player-0 .cover strong').textContent)"
        )


def test_tetris_is_played_by_keys_with_next_pieces_and_high_scores(browser: Any, servers: dict[str, Served]) -> None:
    with Tab(browser, servers["tetris"].url) as page:
        page.wait_for_selector("[data-title=next] canvas")
        page.wait_for_selector("[data-title=hold] canvas")
        assert "hard drop" in page.inner_text("#keys")
        page.keyboard.press("ArrowLeft")
        wait_until(page, "document.querySelector('#player-0 .cover').hidden")
        before = picture(page, "[data-title=next] canvas")
        page.keyboard.press(" ")
        wait_until(page, "before => document.querySelector('[data-title=next] canvas').toDataURL() !== before", before)
        empty = picture(page, "[data-title=hold] canvas")
        page.keyboard.press("c")
        wait_until(page, "empty => document.querySelector('[data-title=hold] canvas').toDataURL() !== empty", empty)
        keep(page, "play-tetris")
        for _ in range(60):  # up to the top
            page.keyboard.press(" ")
            page.wait_for_timeout(60)
            if page.inner_text("#player-0 .cover strong") == "Game over" and page.is_visible("#player-0 .cover"):
                break
        wait_until(page, "document.querySelector('#player-0 .cover strong').textContent === 'Game over'")


def test_a_server_that_ends_is_told(browser: Any, runs: list[Path]) -> None:
    server = Served(WatchPage(runs[:1], lazy=True))
    tab = Tab(browser, server.url)
    tab.page.wait_for_selector(".run")
    server.stop()
    tab.page.wait_for_selector("#connection:visible")
    assert "The server has ended" in tab.page.inner_text("#connection")
    tab.page.close()


def test_a_replay_is_one_file_with_controls(browser: Any, snake_run: Path, tmp_path: Path) -> None:
    agent = load_agent(snake_run, "cpu")
    record = record_games(agent, 0, 2, 30)
    record["name"] = "</script><script>alert(1)"  # the name of a folder is not trusted
    write_replay(tmp_path / "replay.html", record, fps=10)
    tab = Tab(browser, "about:blank")
    with tab as page:
        page.goto(f"file://{tmp_path}/replay.html")
        page.wait_for_selector("canvas[data-drawn]")
        wait_until(page, "Number(document.querySelector('#time').value) > 2")
        page.keyboard.press(" ")
        wait_until(page, "document.querySelector('#play').textContent !== 'Pause'")
        place = int(page.input_value("#time"))
        page.keyboard.press("ArrowLeft")
        assert int(page.input_value("#time")) == place - 1
        shown = picture(page, "canvas.main")
        page.click("#step")
        assert picture(page, "canvas.main") != shown
        page.select_option("#game", "1")
        assert page.locator("#game option").count() == 2
        assert "straight on" in page.inner_text("#outputs")
        assert page.title().startswith("</script>")
        keep(page, "replay")
        assert all(
            line.startswith("file:")
            for line in page.evaluate("performance.getEntries().map(e => e.name)")
            if ":" in line
        )
