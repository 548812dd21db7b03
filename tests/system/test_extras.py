"""How to install what a feature needs, where no index has vlm-serve itself."""

from __future__ import annotations

from importlib import metadata

import pytest

from vlm_serve.system.extras import install_command


def test_the_packages_of_an_extra_are_named() -> None:
    assert install_command("store").startswith("pip install 'redis>=")
    command = install_command("otel")
    assert "opentelemetry-sdk" in command and "opentelemetry-exporter-otlp-proto-http" in command
    assert "vlm-serve" not in command


def test_a_package_without_metadata_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    assert install_command("ray") == "pip install 'vlm-serve[ray]'"
