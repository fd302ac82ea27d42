"""The server keeps to itself: who may connect, what it answers, and what a bad viewer can do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
import websockets.sync.client as ws
from websockets.exceptions import ConnectionClosed, InvalidStatus

from redline.core.errors import UserError
from redline.web import hub as hub_module
from redline.web.hub import Hub, Outbox, parse_command
from redline.web.serve import address, listen, make_app, serve
from redline.web.static_files import static_files


class Toy:
    """A page whose viewers get a greeting, and whose commands are kept."""

    html = "watch.html"

    def __init__(self) -> None:
        self.commands: list[dict[str, Any]] = []
        self.hub = Hub(lambda: ['{"type":"hello"}'], self.commands.append)
        self.loop: asyncio.AbstractEventLoop | None = None

    async def run(self) -> None:
        self.loop = asyncio.get_running_loop()
        await asyncio.Event().wait()

    def close(self) -> None:
        pass


class Served(Toy):
    """The toy on a port of its own, in a thread."""

    def __init__(self, host: str = "127.0.0.1", token: str = "") -> None:
        super().__init__()
        self.listener = listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        app = make_app(self, host, self.port, token)
        options: dict[str, Any] = {"log_level": "critical", "ws_max_size": hub_module.MAX_MESSAGE}
        self.server = uvicorn.Server(uvicorn.Config(app, ws_per_message_deflate=False, **options))
        self.thread = threading.Thread(
            target=lambda: asyncio.run(self.server.serve(sockets=[self.listener])), daemon=True
        )
        self.thread.start()
        wait_for(lambda: self.server.started and self.loop is not None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def send(self, text: str, frame_of: Any = None) -> None:
        """Send to all viewers, from the server's own thread."""
        assert self.loop
        done = threading.Event()
        self.loop.call_soon_threadsafe(lambda: (self.hub.send(text, frame_of), done.set()))
        assert done.wait(10)

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(10)

    def open(self, **headers: str) -> ws.ClientConnection:
        return ws.connect(f"ws://127.0.0.1:{self.port}/socket", additional_headers=headers, max_size=None).__enter__()


def wait_for(condition: Callable[[], Any], seconds: float = 20) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    toy = Served()
    yield toy
    toy.stop()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Served]:
    toy = Served(host="0.0.0.0", token="a-secret")
    yield toy
    toy.stop()


@pytest.mark.fault("H6")
def test_the_page_and_its_files_come_with_strict_headers(served: Served) -> None:
    for name in ("", *static_files()):
        answer = httpx.get(f"{served.url}/{name}")
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"


@pytest.mark.fault("H6")
def test_no_file_names_another_machine() -> None:
    """The page works without a network: nothing is loaded from elsewhere."""
    for name, content in static_files().items():
        text = content.decode().replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text, name
        assert "https://" not in text.replace('"https:"', ""), name
        assert "//cdn" not in text


@pytest.mark.fault("H6")
@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/..%2f..%2fetc%2fpasswd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/static/style.css",
        "/style.css/..",
        "//etc/passwd",
    ],
)
def test_no_path_leads_to_a_file_outside(served: Served, path: str) -> None:
    with socket.create_connection(("127.0.0.1", served.port)) as raw:  # as it is: a client library would tidy the path
        raw.sendall(f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: raw.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 404")
    assert b"root:" not in answer


@pytest.mark.fault("H6")
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
def test_nothing_can_be_written(served: Served, method: str) -> None:
    assert httpx.request(method, served.url).status_code == 405


@pytest.mark.fault("H6")
@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"Host": "evil.example"}, 403),  # a stranger's name that resolves to this machine
        ({"Host": "127.0.0.1:1"}, 403),
        ({"Host": "192.168.1.4:{port}"}, 403),
        ({"Host": "x@127.0.0.1:{port}"}, 403),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Host": "localhost:{port}"}, 200),
        ({"Origin": "http://127.0.0.1:{port}"}, 200),
    ],
)
def test_host_and_origin_are_checked(served: Served, headers: dict[str, str], code: int) -> None:
    given = {name: value.format(port=served.port) for name, value in headers.items()}
    assert httpx.get(served.url, headers=given).status_code == code
    if "Host" not in given:  # the client library writes its own Host
        if code == 403:
            with pytest.raises(InvalidStatus):
                served.open(**given)
        else:
            served.open(**given).close()


@pytest.mark.fault("H6")
def test_elsewhere_a_token_is_needed(guarded: Served) -> None:
    assert httpx.get(guarded.url).status_code == 403
    assert httpx.get(f"{guarded.url}/?token=wrong").status_code == 403
    assert httpx.get(f"{guarded.url}/style.css").status_code == 403
    with pytest.raises(InvalidStatus):
        guarded.open()
    with pytest.raises(InvalidStatus):
        guarded.open(Cookie=f"redline-{guarded.port}=wrong")
    with httpx.Client() as browser:
        answer = browser.get(f"{guarded.url}/?token=a-secret")
        assert answer.status_code == 303
        assert "a-secret" not in answer.headers["location"]
        assert "HttpOnly" in answer.headers["set-cookie"]
        assert "samesite=strict" in answer.headers["set-cookie"].lower()
        assert browser.get(guarded.url).status_code == 200
    viewer = guarded.open(Cookie=f"redline-{guarded.port}=a-secret")
    assert json.loads(viewer.recv(10)) == {"type": "hello"}
    viewer.close()
    assert httpx.get(guarded.url, headers={"Host": f"evil.example:{guarded.port}"}).status_code == 403


@pytest.mark.fault("H6")
def test_the_address_carries_the_token_and_loopback_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(uvicorn.Server, "serve", lambda self, sockets: asyncio.sleep(0))  # noqa: ARG005
    serve(Toy(), "127.0.0.1", 0, said.append)
    serve(Toy(), "0.0.0.0", 0, said.append)
    assert "token" not in said[0]
    assert said[0].startswith("http://127.0.0.1:")
    assert len(said[1].partition("?token=")[2]) >= 20
    assert address("::1", 5, "") == "http://[::1]:5/"


@pytest.mark.fault("H6")
def test_a_busy_port_is_told_or_avoided() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=rf"The page cannot be served on 127.0.0.1, port {port}: .* --port"):
            listen("127.0.0.1", port)
    with listen("127.0.0.1", None) as first, listen("127.0.0.1", None) as second:
        assert first.getsockname()[1] != second.getsockname()[1]
    with pytest.raises(UserError, match=r"cannot be served on no\.such\.host\.invalid"):
        listen("no.such.host.invalid", 0)


@pytest.mark.fault("H6")
def test_a_slow_viewer_loses_frames_and_delays_nobody(served: Served) -> None:
    """64 MB for a viewer that reads nothing: the server keeps one frame, and another viewer gets them all."""
    slow, quick = served.open(), served.open()
    wait_for(lambda: len(served.hub.outboxes) == 2)
    received: list[int] = []

    def read() -> None:
        with contextlib.suppress(ConnectionClosed, TimeoutError):
            while True:
                received.append(len(quick.recv(10)))

    reader = threading.Thread(target=read, daemon=True)
    # The library reads in the background until its own queue is full: stop that at the socket.
    slow.recv_messages.high = 1  # type: ignore[attr-defined]
    reader.start()
    frame = "x" * (1 << 20)
    for number in range(64):
        before = len(received)
        served.send(frame + str(number), frame_of=0)
        wait_for(lambda before=before: len(received) > before)  # type: ignore[misc]
    dropped = [outbox.dropped for outbox in served.hub.outboxes]
    assert max(dropped) > 20
    assert all(len(outbox._frames) <= 1 for outbox in served.hub.outboxes)
    for viewer in (slow, quick):
        viewer.socket.close()
    wait_for(lambda: not served.hub.outboxes)


@pytest.mark.fault("H6")
def test_an_outbox_is_bounded() -> None:
    async def fill() -> Outbox:
        outbox = Outbox()
        for number in range(1000):
            outbox.put(str(number), frame_of="run")
            outbox.put(str(number))
        assert await outbox.get() == "0"
        return outbox

    outbox = asyncio.run(fill())
    assert len(outbox._messages) == hub_module.MAX_WAITING - 1
    assert list(outbox._frames.values()) == ["999"]
    assert outbox.lost  # the viewer starts over rather than miss messages
    assert outbox.dropped == 999


@pytest.mark.fault("H6")
def test_viewers_beyond_the_limit_are_turned_away(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "MAX_VIEWERS", 3)
    viewers = [served.open() for _ in range(3)]
    assert all(viewer.recv(10) for viewer in viewers)
    late = served.open()
    with pytest.raises(ConnectionClosed, match="Too many viewers"):
        late.recv(10)
    viewers.pop().close()
    wait_for(lambda: len(served.hub.outboxes) == 2)
    again = served.open()
    assert again.recv(10)
    for viewer in (*viewers, again):
        viewer.close()
    wait_for(lambda: not served.hub.outboxes)


@pytest.mark.fault("H6")
@pytest.mark.parametrize(
    "message",
    [
        "x" * 5000, "not JSON", "[" * 900, "[]", '{"do": 3}', '{"do": "pause", "more": 1}', '{"do": "a", "value": {"b": 1}}',
        '{"do": "a", "value": NaN}', b"\x00\x01",
    ],
)  # fmt: skip
def test_a_bad_message_ends_the_connection_and_nothing_else(served: Served, message: str | bytes) -> None:
    before = len(served.commands)
    viewer, other = served.open(), served.open()
    viewer.recv(10)
    viewer.send(message)
    with pytest.raises(ConnectionClosed):
        viewer.recv(10)
    assert len(served.commands) == before
    other.recv(10)
    other.send('{"do": "step"}')
    wait_for(lambda: served.commands[before:] == [{"do": "step"}])
    other.close()
    wait_for(lambda: not served.hub.outboxes)


@pytest.mark.fault("H6")
def test_a_flood_of_messages_ends_the_connection(served: Served) -> None:
    viewer = served.open()
    viewer.recv(10)

    def flood() -> None:
        for _ in range(2000):
            viewer.send('{"do": "step"}')
            with contextlib.suppress(TimeoutError):
                viewer.recv(0)

    with pytest.raises(ConnectionClosed, match="Too many messages"):
        flood()
    wait_for(lambda: not served.hub.outboxes)


@pytest.mark.fault("H6")
def test_commands_are_parsed_strictly() -> None:
    assert parse_command('{"do": "speed", "value": 3}') == {"do": "speed", "value": 3}
    assert parse_command('{"do": "key", "value": "a"}') == {"do": "key", "value": "a"}
    assert parse_command('{"value": 3}') is None


@pytest.mark.fault("H6")
def test_the_server_never_opens_a_file_of_the_viewers_choice(served: Served, tmp_path: Path) -> None:
    """Names of files come from a table made at the start, whatever lies in the folder of the package."""
    assert set(static_files()) == {
        entry.name for entry in Path(hub_module.__file__).parent.joinpath("static").iterdir()
    }
    (tmp_path / "secret").write_text("secret")
    assert httpx.get(f"{served.url}/{tmp_path}/secret").status_code == 404
