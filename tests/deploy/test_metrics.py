"""One text of metrics from many."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from vlm_serve.deploy.gateway_routes import labelled, own_metrics

ONE = """# HELP a:b_total What a does
# TYPE a:b_total counter
a:b_total{model_name="m",path="x{y}"} 3.0
# HELP plain Without labels
# TYPE plain gauge
plain 1.5
"""
OTHER = ONE.replace("3.0", "4.0").replace("1.5", "2.5")


def test_every_sample_says_of_which_replica_it_is() -> None:
    text = labelled({"r1": ONE, "r2": OTHER})
    assert text.count("# TYPE a:b_total counter") == 1
    families = {family.name: family for family in text_string_to_metric_families(text)}
    counted = {s.labels["replica"]: s.value for s in families["a:b"].samples}
    assert counted == {"r1": 3.0, "r2": 4.0}
    assert {s.labels["path"] for s in families["a:b"].samples} == {"x{y}"}
    assert {s.labels["replica"]: s.value for s in families["plain"].samples} == {
        "r1": 1.5,
        "r2": 2.5,
    }


def test_families_stay_together() -> None:
    lines = labelled({"r1": ONE, "r2": OTHER}).splitlines()
    names = [line.split("{")[0] for line in lines if not line.startswith("#")]
    assert names == ["a:b_total", "a:b_total", "plain", "plain"]


def test_a_family_that_one_replica_lacks_does_not_matter() -> None:
    text = labelled({"r1": "", "r2": ONE})
    assert 'plain{replica="r2"} 1.5' in text and "r1" not in text


def test_the_front_counts_what_only_it_knows() -> None:
    families = {f.name: f for f in text_string_to_metric_families(own_metrics(3, 7, 2))}
    assert families["vlm_serve:replicas"].samples[0].value == 3
    assert families["vlm_serve:front_open_requests"].samples[0].value == 7
    assert families["vlm_serve:failovers"].samples[0].value == 2
