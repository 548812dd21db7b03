"""Measure how smoothly the page's map of the cache scrolls, and how long each frame takes to draw.

    PYTHONPATH=. python benchmarks/page.py [--nodes 10000] [--seconds 5]

A real Chromium scrolls through a tree of made nodes up and down; the frames are counted by the
browser's own clock. Nothing else should run on the machine. Needs Debian's chromium and the
development dependencies.
"""

from __future__ import annotations

import argparse
import statistics
import sys

import common  # noqa: F401  # First: it adds examples/ and tests/ to the path.
from browser import SMALL_SERVER, Visit, chromium
from common.machine import describe
from page_tree import event, telling, tree_of
from playwright.sync_api import expect
from server_process import server_process

SCROLL = """async (seconds) => {
    const area = document.querySelector(".icicle");
    const drawn = [];
    const observer = new PerformanceObserver(
        (list) => drawn.push(...list.getEntriesByName("icicle")));
    observer.observe({type: "measure"});
    const frames = [];
    const begin = performance.now();
    while (performance.now() - begin < 1000 * seconds) {
        const turn = ((performance.now() - begin) / 2000) % 2;  // two seconds from end to end
        const share = turn < 1 ? turn : 2 - turn;
        area.scrollTop = share * (area.scrollHeight - area.clientHeight);
        frames.push(await new Promise(requestAnimationFrame));
    }
    await new Promise((resolve) => setTimeout(resolve, 100));
    return [frames, drawn.map((entry) => entry.duration)];
}"""


def measure(nodes: int, seconds: float) -> tuple[list[float], list[float]]:
    """Milliseconds between frames, and those that each drawing took."""
    told = event("tree", tree_of(nodes))
    with server_process(*SMALL_SERVER) as server, chromium() as browser:
        visit = Visit(browser, server.url, viewport={"width": 1280, "height": 800})
        visit.page.route("**/v1/cache/events", lambda route: telling(route, told))
        visit.open("live")
        expect(visit.page.locator(".live-bar .lead")).to_contain_text("nodes")
        times, drawn = visit.page.evaluate(SCROLL, seconds)
        visit.close()
    return [after - before for before, after in zip(times, times[1:], strict=False)], drawn


def main() -> int:
    parser = argparse.ArgumentParser(description="frames a second of the page's map of the cache")
    parser.add_argument("--nodes", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    gaps, drawn = measure(options.nodes, options.seconds)
    print(describe(threads=1))
    print(f"{options.nodes} nodes, {len(gaps)} frames in {sum(gaps) / 1000:.1f} s")
    print(f"  frames a second  {1000 * len(gaps) / sum(gaps):.1f}")
    print(f"  longest frame    {max(gaps):.1f} ms")
    print(f"  one drawing      {statistics.median(drawn):.2f} ms, longest {max(drawn):.2f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
