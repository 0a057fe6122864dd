"""Moves the pointer over every square of both heat maps, and compares the text that appears with the figures.

The browser is driven by the protocol of WebDriver (W3C), through chromedriver.
"""

import base64
import decimal
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
import urllib.request

page, figures = pathlib.Path(sys.argv[1]).resolve(), json.load(open(sys.argv[2]))
ranks = figures["ranks"]
pairs = {(pair["a"], pair["b"]): pair for pair in figures["pairs"]}


def free_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


port = free_port()
# The driver leaves the browser running when it ends early: both are in one session, which is killed as a whole.
driver = subprocess.Popen(
    ["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
)


def call(method, path, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, {"Content-Type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=300) as answer:
        return json.load(answer)["value"]


HALF_UP = decimal.Context(prec=3, rounding=decimal.ROUND_HALF_UP)


def number(value, unit):
    """What Number.toPrecision(3) of JavaScript shows, read back as a number. Of two numbers that are as close, it shows the larger one."""
    return "not measured" if value is None else (float(HALF_UP.create_decimal(value)), unit)


def read(text):
    return "not measured" if text == "not measured" else (float(text.split(" ")[0]), text.split(" ")[1])


def check(text, source, target):
    lines = text.split("\n")
    host = lambda rank: f"rank {rank} on {ranks[rank]['host']}"
    if source == target:
        assert lines[0].startswith(host(source)), text
        return
    pair = pairs[min(source, target), max(source, target)]
    there, back = (pair["a_to_b"], pair["b_to_a"]) if source < target else (pair["b_to_a"], pair["a_to_b"])
    assert lines[0] == f"{host(source)} to {host(target)}", text
    latency, bandwidth, load = (line.split(": ")[1].split(", ") for line in lines[1:4])
    assert read(latency[0].removeprefix("p50 ")) == number(pair["latency"]["p50_us"], "us"), text
    assert read(latency[1].removeprefix("p99 ")) == number(pair["latency"]["p99_us"], "us"), text
    for texts, key in ((bandwidth, "gbit"), (load, "loaded_gbit")):
        assert read(texts[0]) == number(there[key], "Gb/s"), text
        assert read(texts[1].removeprefix("back ")) == number(back[key], "Gb/s"), text
    device = lambda rank: f"{ranks[rank]['provider']} {ranks[rank]['device']}"
    assert lines[4] == f"{device(source)} to {device(target)}", text
    assert ("shm: the link is in shared memory, within a host" in lines) == pair["shm"], text


try:
    for _ in range(1200):
        try:
            if call("GET", "/status")["ready"]:
                break
        except OSError:
            time.sleep(0.1)
    shell = "/usr/bin/chromium-headless-shell"
    binary = {"binary": shell} if pathlib.Path(shell).exists() else {}
    options = {"args": ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,900"], **binary}
    session = call("POST", "/session", {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})["sessionId"]
    path = f"/session/{session}"
    call("POST", f"{path}/url", {"url": page.as_uri()})
    boxes = call("POST", f"{path}/execute/sync", {"args": [], "script": """
        return [...document.querySelectorAll(".panel")].map(panel => {
            const box = panel.getBoundingClientRect();
            return [panel.dataset.figure, box.left, box.top, box.width];
        });"""})
    assert [box[0] for box in boxes] == ["latency", "bandwidth"], boxes
    count = 0
    for _, left, top, width in boxes:
        side = width / len(ranks)
        for source in range(len(ranks)):
            for target in range(len(ranks)):
                x, y = round(left + (target + 0.5) * side), round(top + (source + 0.5) * side)
                move = {"type": "pointerMove", "duration": 0, "x": x, "y": y}
                call("POST", f"{path}/actions", {"actions": [
                    {"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": [move]}]})
                element = call("POST", f"{path}/element", {"using": "css selector", "value": "#hover"})
                text = call("GET", f"{path}/element/{next(iter(element.values()))}/text")
                check(text, source, target)
                count += 1
    picture = call("GET", f"{path}/screenshot")
    page.with_suffix(".png").write_bytes(base64.b64decode(picture))
    call("DELETE", path)
    print(f"{count} squares have the text of their pair; the last:\n{text}")
finally:
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait(10)
