"""How a tree becomes runs and rows."""

from __future__ import annotations

import json
from typing import Any

from browser import Visit
from page_tree import ROOT, node

LAY_OUT = """async (told) => {
    const [tree, batches, now] = JSON.parse(told);
    const {Tree} = await import("/live/tree.js");
    const {layOut, runAt} = await import("/live/layout.js");
    const mine = new Tree();
    mine.reset(tree);
    batches.forEach((changes) => mine.apply({changes}, now));
    const due = mine.sweep(now + 1);
    const {layout} = layOut(mine);
    const late = mine.sweep(now + 10_000);
    const plain = Object.fromEntries(Object.entries(layout).map(
        ([name, value]) => [name, ArrayBuffer.isView(value) ? Array.from(value) : value]));
    const places = [[0, 0], [20, 0.5], [20, 1.5], [40, 1.5], [99, 0]];
    const at = places.map(([x, y]) => runAt(layout, x, y));
    return JSON.stringify({...plain, at, due, late, whole: mine.whole()});
}"""


def lay_out(visit: Visit, nodes: list[dict[str, Any]], *batches: list[Any]) -> dict[str, Any]:
    tree = {"roots": [{"key": ROOT}], "nodes": nodes}
    told = json.loads(visit.page.evaluate(LAY_OUT, json.dumps([tree, batches, 1000])))
    assert isinstance(told, dict)
    return told


def branching() -> list[dict[str, Any]]:
    """a - b, then two branches: c - d (with a snapshot and a picture), and e."""
    return [
        node("a", ROOT, 0),
        node("b", "a", 16, hits=3),
        node("c", "b", 32, media=True),
        node("d", "c", 48, snapshot="turn"),
        node("e", "b", 32, pins=2),
    ]


def test_nodes_without_branches_are_one_run(visit: Visit) -> None:
    told = lay_out(visit, branching())
    assert told["key"] == ["b", "d", "e"]
    assert told["parent"] == [-1, 0, 0]
    assert told["next"] == [3, 2, 3]
    assert told["level"] == [1, 2, 2]
    assert (told["start"], told["end"]) == ([0, 32, 32], [32, 64, 48])
    assert (told["top"], told["bottom"]) == ([0, 0, 1], [2, 1, 2])
    assert (told["nodes"], told["hits"], told["pins"]) == ([2, 2, 1], [3, 1, 1], [0, 0, 2])
    assert told["snapshots"] == [[], [64], []]
    media = [[(span["at"], span["length"]) for span in spans] for spans in told["media"]]
    assert media == [[], [(34, 64)], []]
    assert (told["rows"], told["length"], told["numNodes"]) == (2, 64, 5)
    assert told["at"] == [0, 0, 0, 2, -1]


def test_a_picture_goes_on_where_its_run_ends(visit: Visit) -> None:
    nodes = [node("a", ROOT, 0, media=True), node("b", "a", 16), node("c", "a", 16)]
    told = lay_out(visit, nodes)
    media = [
        [(span["at"], span["length"], span["begins"]) for span in spans] for spans in told["media"]
    ]
    assert media == [[(2, 64, True)], [(16, 50, False)], [(16, 50, False)]]


def test_another_tier_begins_another_run(visit: Visit) -> None:
    nodes = [node("a", ROOT, 0), node("b", "a", 16, tier="host"), node("c", "b", 32, tier="host")]
    told = lay_out(visit, nodes)
    assert told["key"] == ["a", "c"]
    assert told["tier"] == [0, 1]


def test_changes_make_the_tree_that_the_server_has(visit: Visit) -> None:
    changes = [
        {"type": "node_added", "node": node("f", "e", 48)},
        {"type": "snapshot_ready", "key": "f", "snapshot": "prompt"},
        {"type": "snapshot_evicted", "key": "d"},
        {"type": "pinned", "key": "e", "pins": 0, "hits": 5},
        {"type": "hit", "key": "", "prompt_tokens": 9, "cached_tokens": 0, "reason": "cold"},
    ]
    told = lay_out(visit, branching(), changes)
    after = {each["key"]: each for each in told["whole"]["nodes"]}
    assert after["f"]["snapshot"] == "prompt"
    assert after["d"]["snapshot"] is None
    assert (after["e"]["pins"], after["e"]["hits"]) == (0, 5)


def test_what_is_evicted_is_seen_to_go(visit: Visit) -> None:
    told = lay_out(visit, branching(), [{"type": "node_evicted", "key": "e"}])
    assert told["key"] == ["b", "d", "e"]
    assert told["tier"] == [0, 0, 3]
    assert told["due"] is not None
    assert told["late"] is None
    assert [each["key"] for each in told["whole"]["nodes"]] == ["a", "b", "c", "d"]


def test_what_is_evicted_and_comes_again_stays(visit: Visit) -> None:
    changes = [{"type": "node_evicted", "key": "e"}, {"type": "node_added", "node": branching()[4]}]
    told = lay_out(visit, branching(), changes)
    assert told["tier"] == [0, 0, 0]
    assert len(told["whole"]["nodes"]) == 5


def test_a_path_that_is_evicted_goes_as_a_whole(visit: Visit) -> None:
    gone = [{"type": "node_evicted", "key": key} for key in ("d", "c", "e", "b", "a")]
    told = lay_out(visit, branching(), gone)
    assert told["whole"] == {"roots": [], "nodes": []}


def test_a_prompt_of_many_branches_is_laid_out_without_recursion(visit: Visit) -> None:
    nodes = []
    for number in range(6000):
        parent = f"n{number - 1}" if number else ROOT
        nodes += [node(f"n{number}", parent, 16 * number), node(f"t{number}", parent, 16 * number)]
    told = lay_out(visit, nodes)
    assert told["numNodes"] == 12_000
    assert told["rows"] == 6001
