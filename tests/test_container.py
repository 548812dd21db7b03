"""Dockerfile and compose.yaml: what they name exists, and the command that they start is accepted.

`make image-steps` runs the Dockerfile's steps themselves.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile import ROOT, Instruction, arguments, copies, read

from vlm_serve.cli import build_parser
from vlm_serve.options.declared import check_environment, from_environment, options_of
from vlm_serve.server.config import ServerConfig

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
STEPS = read()


def only(name: str) -> Instruction:
    (found,) = [each for each in STEPS if each.name == name]
    return found


def environment() -> dict[str, str]:
    """What the image sets."""
    return dict(each.text.split("=", 1) for each in STEPS if each.name == "ENV")


def parsed(words: list[str]) -> Any:
    """A command line as the command itself reads it."""
    return build_parser().parse_args(words)


def expanded(text: str) -> str:
    """A value of compose.yaml where no variable is set: `${NAME:-default}` is its default."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text)


def test_the_base_is_the_first_argument_and_may_be_another() -> None:
    assert [each.name for each in STEPS[:2]] == ["ARG", "FROM"]
    assert STEPS[1].text == "${BASE}"
    assert arguments({})["BASE"].startswith("debian:")
    assert arguments({"BASE": "nvidia/cuda"})["BASE"] == "nvidia/cuda"
    with pytest.raises(SystemExit, match="no ARG BACE"):
        arguments({"BACE": "debian"})


def test_every_argument_has_an_effect() -> None:
    used = " ".join(each.text for each in STEPS if each.name != "ARG")
    for name in arguments({}):
        assert f"${{{name}" in used


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert ignored[0] == "*"
    sources = [source for names, _ in copies() for source in names]
    assert {f"!{source}" for source in sources} == {line for line in ignored if line[0] == "!"}
    assert all((ROOT / source).exists() for source in sources)


def test_all_that_the_package_consists_of_is_copied() -> None:
    sources = {source for names, _ in copies() for source in names}
    assert {"vlm_serve", "pyproject.toml", "constraints.txt"} <= sources
    links = [path for path in (ROOT / "vlm_serve").iterdir() if path.is_symlink()]
    assert {link.resolve().name for link in links} <= sources


def test_the_extras_of_the_image_exist() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    comment = (ROOT / "Dockerfile").read_text(encoding="utf-8").split("ARG BASE")[0]
    given = re.search(r"EXTRAS=([\w,]+\w)", comment)
    assert given is not None
    for name in (*arguments({})["EXTRAS"].split(","), *given[1].split(",")):
        assert re.search(rf"^{name} = \[", project, re.MULTILINE)


def test_the_command_of_the_image_is_one() -> None:
    assert only("ENTRYPOINT").words == ["/opt/venv/bin/vlm-serve"]
    assert parsed(only("CMD").words).model == "demo"


def test_the_variables_of_the_image_are_options() -> None:
    check_environment(options_of(ServerConfig), environment())
    values = from_environment(options_of(ServerConfig), environment())
    config = ServerConfig(**values)
    assert (config.host, config.port) == ("0.0.0.0", int(only("EXPOSE").text))


def test_the_image_asks_for_its_health_where_it_listens() -> None:
    words = json.loads(only("HEALTHCHECK").text.split("CMD ", 1)[1])
    compile(words[2], "HEALTHCHECK", "exec")
    assert f"127.0.0.1:{only('EXPOSE').text}/health" in words[2]


def test_the_server_runs_as_nobody_special_from_a_folder_of_its_own() -> None:
    user = only("USER").text
    assert any(f" {user}" in each.text for each in STEPS if each.name == "RUN")
    places = [each.text for each in STEPS if each.name == "WORKDIR"]
    assert places[-1] == f"/home/{user}"
    kept = [each.split(":") for each in SERVICES["server"]["volumes"] if each.startswith("kept:")]
    assert kept == [["kept", f"/home/{user}/.cache"]]


def test_the_server_of_compose_starts_with_options_that_there_are() -> None:
    words = [expanded(word) for word in SERVICES["server"]["command"]]
    assert parsed(words).model == "demo"
    assert "stop_grace_period" in SERVICES["server"]
    grace = int(SERVICES["server"]["stop_grace_period"].removesuffix("s"))
    assert grace >= ServerConfig().shutdown_timeout + 20


def test_ports_are_open_on_this_machine_alone() -> None:
    ports = {name: service["ports"] for name, service in SERVICES.items()}
    assert ports["server"] == [f"127.0.0.1:8000:{only('EXPOSE').text}"]
    assert all(port.startswith("127.0.0.1:") for each in ports.values() for port in each)


def test_what_compose_mounts_exists_or_is_declared() -> None:
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if not source.startswith("./"):
                assert source in COMPOSE["volumes"]
            elif source != "./checkpoints":  # Docker makes it where it is missing.
                assert (ROOT / source).is_file() and volume.endswith(":ro")


def mounted(service: str, target: str) -> Path:
    """What stands at a path inside of a service."""
    for volume in SERVICES[service]["volumes"]:
        source, place, *_ = volume.split(":")
        if place == target:
            return Path(ROOT, source)
    raise AssertionError(f"nothing at {target}")


def test_prometheus_asks_the_server_of_compose() -> None:
    config = yaml.safe_load(mounted("prometheus", "/etc/prometheus/prometheus.yml").read_text())
    (job,) = config["scrape_configs"]
    assert job.get("metrics_path", "/metrics") == "/metrics"
    ((target,),) = [each["targets"] for each in job["static_configs"]]
    name, port = target.split(":")
    assert name in SERVICES and port == only("EXPOSE").text


def test_prometheus_takes_its_configuration() -> None:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("Debian's package prometheus has promtool")
    path = mounted("prometheus", "/etc/prometheus/prometheus.yml")
    done = subprocess.run([tool, "check", "config", str(path)], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    folder = "/etc/grafana/provisioning"
    sources = yaml.safe_load(mounted("grafana", f"{folder}/datasources/vlm-serve.yml").read_text())
    (source,) = sources["datasources"]
    name, port = source["url"].removeprefix("http://").split(":")
    assert name in SERVICES and SERVICES[name]["ports"][0].endswith(f":{port}")
    boards = yaml.safe_load(mounted("grafana", f"{folder}/dashboards/vlm-serve.yml").read_text())
    (provider,) = boards["providers"]
    board = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert str(Path(board).parent) == provider["options"]["path"]
    dashboard = json.loads(mounted("grafana", board).read_text())
    variables = {each["name"]: each["query"] for each in dashboard["templating"]["list"]}
    assert variables["datasource"] == source["type"]
    assert source["isDefault"], "what the dashboard's variable is at first"
