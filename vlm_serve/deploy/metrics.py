"""Merges the metrics of all replicas into one text of Prometheus' exposition format."""

from __future__ import annotations

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(\{)?")


def labelled(texts: Mapping[str, str]) -> str:
    """Merge texts into one, with a label `replica` on every sample. Families stay together.

    Args:
        texts: exposition texts by replica name.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}
    for name, text in texts.items():
        headers, samples = families.setdefault("", ([], []))
        for line in text.splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                headers, samples = families.setdefault(family, ([], []))
                if not samples:
                    headers[:] = [line]
            elif line.startswith("#"):
                if line not in headers:
                    headers.append(line)
            elif line:
                samples.append(_with_label(line, name))
    lines = [line for headers, samples in families.values() for line in (*headers, *samples)]
    return "".join(f"{line}\n" for line in lines)


def _with_label(line: str, replica: str) -> str:
    found = _SAMPLE.match(line)
    assert found is not None, line
    rest = line[found.end() :]
    label = f'replica="{replica}"'
    return f"{found[1]}{{{label},{rest}" if found[2] else f"{found[1]}{{{label}}}{rest}"


def own_metrics(replicas: int, num_open: int, num_lost: int) -> str:
    """Return the gateway's own metrics."""
    lost = "Requests that moved to another replica because theirs was lost"
    registry = CollectorRegistry()
    registry.register(
        _Families(
            GaugeMetricFamily("vlm_serve:replicas", "Replicas that are reachable", replicas),
            GaugeMetricFamily(
                "vlm_serve:front_open_requests", "Requests that the gateway has open", num_open
            ),
            CounterMetricFamily("vlm_serve:failovers", lost, num_lost),
        )
    )
    return generate_latest(registry).decode()


class _Families(Collector):
    """A collector of given families."""

    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> tuple[Metric, ...]:
        return self._families
