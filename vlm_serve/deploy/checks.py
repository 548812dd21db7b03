"""Compatibility checks of a deployment's options."""

from __future__ import annotations

from dataclasses import replace

from vlm_serve.deploy.options import DeployConfig
from vlm_serve.errors import ConfigError
from vlm_serve.options.config import EngineConfig
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.browsers import is_unguarded


def check(deploy: DeployConfig, server: ServerConfig, engine: EngineConfig) -> ServerConfig:
    """Return the options of each replica's server. Raise ConfigError if options clash."""
    if is_unguarded(server) and not deploy.without_keys:
        raise ConfigError(
            f"host {server.host} is not loopback and no API key is set: set api_key or "
            "tenant_keys, or pass --without-keys",
            param="host",
        )
    if server.engine_process == "on":
        raise ConfigError(
            "engine_process is not for deploy: a replica is a process of its engine already",
            param="engine_process",
        )
    if deploy.most == 1:
        return server
    loaded = "an adapter would be loaded by one of them only; name adapters by lora_modules"
    kept = "responses are kept in the memory of one process"
    of_one = (
        ("allow_runtime_lora", server.allow_runtime_lora or None, loaded),
        ("response_store", server.response_store or None, kept),
        ("media_store", server.media_store or None, "media are held in the memory of one process"),
        ("batch_store", server.batch_store, "files and batches belong to one process"),
        ("media_files", server.media_files, "files of media belong to one process"),
        ("disk_cache_path", engine.disk_cache_path, "a folder belongs to one process"),
    )
    for name, given, reason in of_one:
        if given is not None:
            raise ConfigError(f"{name} needs one replica: {reason}", param=name)
    return replace(server, response_store=0, media_store=0)
