"""Compatibility checks of a deployment's options."""

from __future__ import annotations

from vlm_serve.deploy.options import DeployConfig
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.browsers import is_loopback


def check(deploy: DeployConfig, server: ServerConfig, engine: EngineConfig) -> None:
    """Raise ConfigError if options are incompatible."""
    has_keys = bool(server.api_key) or server.tenant_keys is not None
    local = server.uds is not None or is_loopback(server.host)
    if not has_keys and not local and not deploy.without_keys:
        raise ConfigError(
            f"host {server.host} is not loopback and no API key is set: set api_key or "
            "tenant_keys, or pass --without-keys",
            param="host",
        )
    if server.allow_runtime_lora and deploy.most > 1:
        raise ConfigError(
            "allow_runtime_lora needs one replica: an adapter would be loaded by one of them only; "
            "name adapters by lora_modules",
            param="allow_runtime_lora",
        )
    if server.response_store is not None and deploy.most > 1:
        raise ConfigError(
            "response_store needs one replica: responses are kept in the memory of one process",
            param="response_store",
        )
    if server.batch_store is not None and deploy.most > 1:
        raise ConfigError(
            "batch_store needs one replica: files and batches belong to one process",
            param="batch_store",
        )
    if engine.disk_cache_path is not None and deploy.most > 1:
        raise ConfigError(
            "disk_cache_path needs one replica: a folder belongs to one process",
            param="disk_cache_path",
        )
