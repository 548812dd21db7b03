"""The files of docs/operations.md: what they start is accepted, and what they name exists.

No cluster is needed: YAML is parsed, commands are given to the parser, and Helm's templates are
filled in by a few lines here, or by `helm` where it is installed.
"""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from vlm_serve.cli import build_parser
from vlm_serve.options.declared import check_environment, options_of
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.auth import OPEN_PATHS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples" / "operations"
CHART = FOLDER / "helm" / "vlm-serve"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
SAVING_SECONDS = 20
"""What the cache is given to be saved, beside --shutdown-timeout."""
CONTAINER = frozenset(
    {"name", "image", "imagePullPolicy", "args", "env", "ports", "resources", "volumeMounts"}
) | {"startupProbe", "livenessProbe", "readinessProbe", "securityContext"}
"""Fields of a container in Kubernetes' API that are used here."""


def parsed(words: list[str]) -> Any:
    return build_parser().parse_args(words)


def check_time_to_end(seconds: float, options: Any) -> None:
    limit = getattr(options, "shutdown_timeout", ServerConfig().shutdown_timeout)
    assert seconds >= limit + SAVING_SECONDS


def check_pod(pod: dict[str, Any]) -> Any:
    """Check a pod's server; return its options."""
    (server,) = pod["containers"]
    assert server.keys() <= CONTAINER
    options = parsed(server["args"])
    check_time_to_end(pod["terminationGracePeriodSeconds"], options)
    assert pod["enableServiceLinks"] is False
    check_environment(
        options_of(ServerConfig), {each["name"]: "" for each in server.get("env", [])}
    )
    (port,) = server["ports"]
    assert port["containerPort"] == ServerConfig().port
    paths = {}
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        asked = server[name]["httpGet"]
        assert asked["port"] == port["name"] and asked["path"].encode() in OPEN_PATHS
        paths[name] = asked["path"]
    assert paths["livenessProbe"] == "/health" and paths["readinessProbe"] == "/ready"
    mounted = {each["name"]: each["mountPath"] for each in server["volumeMounts"]}
    assert mounted.keys() == {each["name"] for each in pod["volumes"]}
    assert options.disk_cache_path.startswith(mounted["cache"] + "/")
    context = pod["securityContext"]
    assert f"--uid {context['runAsUser']} vlm" in (ROOT / "Dockerfile").read_text()
    assert context["fsGroupChangePolicy"] == "OnRootMismatch"
    return options


def check_objects(objects: list[dict[str, Any]]) -> Any:
    """Check a claim, a deployment and a service that belong together; return the options."""
    kinds = {each["kind"]: each for each in objects}
    deployment = kinds["Deployment"]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    for chosen in (
        deployment["selector"]["matchLabels"],
        kinds["Service"]["spec"]["selector"],
    ):
        assert chosen.items() <= labels.items()
    pod = deployment["template"]["spec"]
    (served,) = kinds["Service"]["spec"]["ports"]
    assert served["targetPort"] == pod["containers"][0]["ports"][0]["name"]
    claims = {each["name"]: each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"]}
    assert claims["cache"] == kinds["PersistentVolumeClaim"]["metadata"]["name"]
    return check_pod(pod)


def test_the_manifest_of_kubernetes() -> None:
    text = (FOLDER / "kubernetes.yaml").read_text(encoding="utf-8")
    options = check_objects(list(yaml.safe_load_all(text)))
    assert options.model == "demo"
    assert "key: api-key" in text and "--from-literal=api-key=" in text


def test_the_unit_of_systemd() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read(FOLDER / "vlm-serve.service", encoding="utf-8")
    service = unit["Service"]
    command, *words = shlex.split(service["ExecStart"])
    assert Path(command).is_absolute() and Path(command).name == "vlm-serve"
    options = parsed(words)
    check_time_to_end(int(service["TimeoutStopSec"]), options)
    kept = f"/var/cache/{service['CacheDirectory']}"
    assert service["Environment"] == f"XDG_CACHE_HOME={kept}"
    assert options.disk_cache_path.startswith(f"{kept}/")


def value_of(path: str, values: dict[str, Any]) -> Any:
    """Return `.Values.a.b`. Raises KeyError."""
    found: Any = values
    for name in path.removeprefix(".Values.").split("."):
        found = found[name]
    return found


def filled(text: str, values: dict[str, Any]) -> str:
    """Fill in the few actions that the chart uses. Raises ValueError for any other."""
    lines: list[str] = []
    shown = [True]
    for line in text.splitlines():
        whole = re.fullmatch(r"\s*\{\{-? (.+) \}\}", line)
        if whole and whole[1].startswith("if "):
            shown.append(shown[-1] and bool(value_of(whole[1][3:], values)))
        elif whole and whole[1] == "end":
            shown.pop()
        elif (
            shown[-1]
            and whole
            and (block := re.fullmatch(r"toYaml (\S+) \| nindent (\d+)", whole[1]))
        ):
            inner = yaml.safe_dump(value_of(block[1], values)).splitlines()
            lines += [" " * int(block[2]) + each for each in inner]
        elif shown[-1]:
            lines.append(re.sub(r"\{\{ (.+?) \}\}", lambda found: inline(found[1], values), line))
    assert shown == [True]
    return "\n".join(lines)


def inline(action: str, values: dict[str, Any]) -> str:
    if action == ".Release.Name":
        return "vlm"
    action, _, quoted = action.partition(" | ")
    if action.startswith('printf "%s:%s" '):
        text = ":".join(str(value_of(path, values)) for path in action.split()[2:])
    elif re.fullmatch(r"\.Values(\.\w+)+", action):
        text = str(value_of(action, values))
    else:
        raise ValueError(f"what is {action}?")
    return json.dumps(text) if quoted == "quote" else text


def test_the_chart_by_its_text() -> None:
    templates = sorted((CHART / "templates").iterdir())
    texts = [path.read_text(encoding="utf-8") for path in templates]
    options = check_objects([yaml.safe_load(filled(text, VALUES)) for text in texts])
    assert options.model == VALUES["model"]
    more = VALUES | {
        "apiKeySecret": "keys",
        "modelsClaim": "models",
        "model": "/models/one",
        "args": ["--max-num-seqs=4", "--disk-cache-path=/home/vlm/.cache/entries"],
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "cache": {"size": "5Gi", "storageClass": "fast"},
    }
    objects = [yaml.safe_load(filled(text, more)) for text in texts]
    options = check_objects(objects)
    assert (options.model, options.max_num_seqs) == ("/models/one", 4)
    whole = json.dumps(objects)
    assert all(f'"{word}"' in whole for word in ("keys", "models", "yes", "Exists", "fast", "5Gi"))


def leaves(values: Any, path: str = "") -> set[str]:
    """Paths of the values; those that a template takes whole have no leaves of their own."""
    if isinstance(values, dict) and values and path != ".resources":
        return {found for name in values for found in leaves(values[name], f"{path}.{name}")}
    return {path}


def test_every_value_has_an_effect_and_a_schema() -> None:
    texts = "".join(path.read_text() for path in (CHART / "templates").iterdir())
    assert leaves(VALUES) == set(re.findall(r"\.Values((?:\.\w+)+)", texts))
    schema = json.loads((CHART / "values.schema.json").read_text())
    jsonschema.Draft7Validator.check_schema(schema)
    jsonschema.validate(VALUES, schema)
    for wrong in ({"modle": "demo"}, {"args": ["serve"]}, {"cache": {"size": "much"}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(VALUES | wrong, schema)
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["name"] == CHART.name


@pytest.mark.skipif(not shutil.which("helm"), reason="needs helm")
def test_the_chart_by_helm() -> None:
    made = subprocess.run(
        ["helm", "template", "vlm", str(CHART)], capture_output=True, text=True, check=True
    )
    check_objects([each for each in yaml.safe_load_all(made.stdout) if each])
