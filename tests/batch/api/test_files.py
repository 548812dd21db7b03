"""Files of clients, driven by openai-python with its strictest parsing, and by hostile ones."""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fake_engine import FakeEngine
from serving import RunningServer, running, wait_for

from vlm_serve.batch import file_store
from vlm_serve.preprocess.text.tokenizer import Tokenizer
from vlm_serve.server.config import ServerConfig
from vlm_serve.server.http.auth import Owner

if TYPE_CHECKING:
    import openai

CONTENT = b'{"custom_id": "a"}\n' * 1000
SIZE = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def _client_library() -> None:
    """Import it when tests run: that takes a second, for which no collection waits."""
    global openai
    import openai


def client_of(server: RunningServer, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{server.url}/v1",
        api_key=key,
        max_retries=0,
        _strict_response_validation=True,
    )


@pytest.fixture(scope="module")
def _server(tokenizer: Tokenizer) -> Iterator[RunningServer]:
    with running(FakeEngine(tokenizer), ServerConfig(port=0, batch_store=SIZE)) as server:
        yield server


@pytest.fixture
def server(_server: RunningServer) -> Iterator[RunningServer]:
    """A server; afterwards no file and no byte of a test may be left."""
    yield _server
    for file in _server.client.get("/v1/files").json()["data"]:
        assert _server.client.delete(f"/v1/files/{file['id']}").status_code == 200
    wait_for(lambda: held(_server) == 0)
    assert list(folder_of(_server).iterdir()) == []
    assert _server.service.admission.memory.held == 0


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with client_of(server) as client:
        yield client


def folder_of(server: RunningServer) -> Path:
    return Path(server.files._folder.path)


def held(server: RunningServer) -> int:
    return server.files.num_bytes(Owner(b"", ""))


def upload(server: RunningServer, content: bytes = CONTENT, **fields: Any) -> httpx.Response:
    form = {"purpose": "batch"} | fields.pop("data", {})
    name = fields.pop("name", "in.jsonl")
    return server.client.post("/v1/files", data=form, files={"file": (name, content)}, **fields)


def message_of(answer: httpx.Response) -> str:
    message: str = answer.json()["error"]["message"]
    return message


def test_a_file_is_stored_listed_read_and_deleted(
    client: openai.OpenAI, server: RunningServer
) -> None:
    before = int(time.time())
    file = client.files.create(file=("in.jsonl", CONTENT), purpose="batch")
    assert re.fullmatch(r"file-[0-9a-f]{32}", file.id)
    assert (file.bytes, file.filename, file.purpose) == (len(CONTENT), "in.jsonl", "batch")
    assert file.status == "processed" and before <= file.created_at <= time.time()
    assert client.files.retrieve(file.id) == file
    assert [each.id for each in client.files.list()] == [file.id]
    content = client.files.content(file.id)
    assert content.read() == CONTENT
    assert content.response.headers["content-disposition"] == "attachment"
    assert content.response.headers["x-content-type-options"] == "nosniff"
    head = server.client.head(f"/v1/files/{file.id}/content")
    assert head.headers["content-length"] == str(len(CONTENT)) and head.content == b""
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="there is no file"):
        client.files.retrieve(file.id)
    assert list(client.files.list()) == []


def test_files_expire(
    client: openai.OpenAI, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = client.files.create(
        file=("in.jsonl", b"x"),
        purpose="batch",
        expires_after={"anchor": "created_at", "seconds": 3600},
    )
    assert file.expires_at == file.created_at + 3600
    monkeypatch.setattr("vlm_serve.batch.api.files.LEAST_SECONDS", 1)
    form = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "1"}
    soon = upload(server, data=form).json()["id"]
    assert server.client.get(f"/v1/files/{soon}").status_code == 200
    wait_for(lambda: server.client.get(f"/v1/files/{soon}").status_code == 404)
    assert held(server) == 1


def test_lists_have_pages(client: openai.OpenAI, server: RunningServer) -> None:
    ids = [client.files.create(file=(f"{n}.jsonl", b"x"), purpose="batch").id for n in range(5)]
    assert [each.id for each in client.files.list()] == ids[::-1]
    assert [each.id for each in client.files.list(order="asc", limit=2)] == ids
    page = client.files.list(limit=2, after=ids[3])
    assert [each.id for each in page.data] == [ids[2], ids[1]] and page.has_more
    assert list(client.files.list(purpose="batch_output")) == []
    for query in ("limit=0", "limit=10001", "limit=x", "order=up", "after=file-0"):
        answer = server.client.get(f"/v1/files?{query}")
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == query.partition("=")[0]


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("../../etc/passwd", "passwd"),
        ("C:\\temp\\in.jsonl", "in.jsonl"),
        ("/", "file"),
        ("a\u202eb.jsonl", "ab.jsonl"),
        ("x" * 300, "x" * 255),
        ("\u00fc \u4f60.jsonl", "\u00fc \u4f60.jsonl"),
    ],
)
def test_names_of_files_are_labels(server: RunningServer, given: str, shown: str) -> None:
    file = upload(server, name=given).json()
    assert file["filename"] == shown
    assert [path.name for path in folder_of(server).iterdir()] == [file["id"]]


@pytest.mark.parametrize(
    "name", ["..", "%2e%2e", "..%2Ffile", "file-%00", "file-0%0A", "%2Fetc%2Fpasswd", "x" * 4000]
)
def test_ids_that_name_nothing(server: RunningServer, name: str) -> None:
    upload(server)
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/content")):
        answer = server.client.request(method, f"/v1/files/{name}{path}")
        assert answer.status_code in (404, 405) and message_of(answer)
    assert len(server.client.get("/v1/files").json()["data"]) == 1


FORM = {"content-type": "multipart/form-data; boundary=b"}
FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n'
PURPOSE = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
END = b"--b--\r\n"


def part(name: str, content: bytes) -> bytes:
    head = f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n'
    return head.encode() + content + b"\r\n"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (PURPOSE + END, "no file"),
        (FILE + END, "purpose must be batch"),
        (FILE + part("purpose", b"assistants") + END, "purpose must be batch"),
        (FILE + part("purpose", b"x" * 2000) + END, "purpose is too long"),
        (PURPOSE + FILE, "cut off"),
        (PURPOSE + FILE + FILE + END, "file is given twice"),
        (PURPOSE + PURPOSE + FILE + END, "purpose is given twice"),
        (PURPOSE + part("other", b"x") + FILE + END, "unknown field 'other'"),
        (PURPOSE + FILE + part("expires_after[seconds]", b"3600") + END, "must be created_at"),
        (
            PURPOSE
            + FILE
            + part("expires_after[anchor]", b"created_at")
            + part("expires_after[seconds]", b"-1")
            + END,
            "must be from 3600",
        ),
        (b"{}", "cut off"),
        (b"", "cut off"),
        (b"x" * (1 << 17), "outside of its parts"),
        (PURPOSE + b"--b\r\n" + b"x" * 9000, "headers of a part"),
    ],
)
def test_bad_forms_leave_nothing(server: RunningServer, body: bytes, said: str) -> None:
    answer = server.client.post("/v1/files", content=body, headers=FORM)
    assert answer.status_code == 400 and said in message_of(answer), answer.text
    wait_for(lambda: held(server) == 0)
    assert list(folder_of(server).iterdir()) == []


@pytest.mark.parametrize("kind", ["application/json", "multipart/form-data", "text/plain", None])
def test_other_types_are_refused(server: RunningServer, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    answer = server.client.post("/v1/files", content=PURPOSE + FILE + END, headers=headers)
    assert answer.status_code == 415 and "multipart/form-data" in message_of(answer)


def test_a_full_store_refuses_and_deletes_nothing(
    server: RunningServer, client: openai.OpenAI
) -> None:
    first = client.files.create(file=("a", b"x" * (SIZE - 1000)), purpose="batch")
    with pytest.raises(openai.APIStatusError, match="1048576|1 MiB") as caught:
        client.files.create(file=("b", b"x" * 1001), purpose="batch")
    assert caught.value.status_code == 413 and caught.value.code == "batch_store_full"
    assert held(server) == SIZE - 1000
    second = client.files.create(file=("b", b"x" * 1000), purpose="batch")
    client.files.delete(first.id)
    too_large = upload(server, b"x" * (SIZE + 1))
    assert too_large.status_code == 413
    client.files.delete(second.id)
    too_large = upload(server, b"x" * (SIZE + (1 << 20)))  # refused by its length
    assert too_large.status_code == 413 and "larger than the" in message_of(too_large)
    assert held(server) == 0


def test_uploads_of_unknown_length_are_cut_at_the_limit(server: RunningServer) -> None:
    def endless() -> Iterator[bytes]:
        yield PURPOSE + FILE.removesuffix(b"x\r\n")
        for _ in range(1000):
            yield b"y" * (1 << 16)

    try:
        answer = server.client.post("/v1/files", content=endless(), headers=FORM)
        assert answer.status_code == 413
    except httpx.HTTPError:  # the server may close the connection before all is sent
        pass
    wait_for(lambda: held(server) == 0)


def test_many_uploads_at_a_time_never_exceed_the_limit(server: RunningServer) -> None:
    statuses: list[int] = []
    peak = 0

    def one() -> None:
        statuses.append(upload(server, b"x" * (SIZE // 3)).status_code)

    threads = [threading.Thread(target=one) for _ in range(12)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        peak = max(peak, held(server))
        time.sleep(0.001)
    assert peak <= SIZE
    assert sorted(set(statuses)) == [200, 413]
    files = server.client.get("/v1/files").json()["data"]
    assert len(files) == statuses.count(200) and held(server) == sum(f["bytes"] for f in files)


def test_the_number_of_files_is_bounded(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_store, "MAX_FILES", 2)
    assert [upload(server, b"").status_code for _ in range(3)] == [200, 200, 413]


def test_an_upload_needs_little_memory(server: RunningServer) -> None:
    memory = server.service.admission.memory
    host, port = server.url.removeprefix("http://").split(":")
    body = PURPOSE + FILE.removesuffix(b"x\r\n") + b"y" * (SIZE - 1000) + b"\r\n" + END
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Type: {FORM['content-type']}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode())
        connection.sendall(body[: 3 * len(body) // 4])
        wait_for(lambda: held(server) > len(body) // 2)
        assert 0 < memory.held <= 3 << 18
        connection.sendall(body[3 * len(body) // 4 :])
        answer = connection.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 200")


def test_a_client_that_leaves_leaves_nothing(server: RunningServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    head = (
        f"POST /v1/files HTTP/1.1\r\nHost: {host}\r\nContent-Type: {FORM['content-type']}\r\n"
        "Content-Length: 900000\r\n\r\n"
    )
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(head.encode() + PURPOSE + FILE.removesuffix(b"\r\n") + b"y" * 600_000)
        wait_for(lambda: held(server) > 0)
    wait_for(lambda: held(server) == 0)
    assert list(folder_of(server).iterdir()) == []


def test_a_disk_that_is_full_is_an_error_of_the_api(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(file_store.Draft, "_append", full)
    answer = upload(server)
    assert answer.status_code == 507 and "No space left" in message_of(answer)
    assert held(server) == 0


def test_a_half_written_piece_is_taken_back(server: RunningServer) -> None:
    class Full:
        """A file on a disk that fills in the middle of a piece."""

        def __init__(self, file: Any) -> None:
            self.file, self.calls = file, 0
            self.tell, self.truncate, self.seek = file.tell, file.truncate, file.seek

        def write(self, data: Any) -> int:
            self.calls += 1
            if self.calls > 1:
                raise OSError(28, "No space left on device")
            written: int = self.file.write(data[:3])
            return written

    draft = server.files.draft(Owner(b"other", ""))
    draft._file.write(b"whole\n")
    real = draft._file
    draft._file = Full(real)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        draft._append(b"half a line\n")
    draft._file = real
    assert draft._path.read_bytes() == b"whole\n" and real.tell() == 6
    draft.discard()


def test_pages_of_other_websites_may_not_upload(server: RunningServer) -> None:
    own = server.url.removeprefix("http://")
    for origin in ("https://evil.example", "null", "http://127.0.0.1:1", "x", f"http://{own}.evil"):
        answer = upload(server, headers={"origin": origin})
        assert answer.status_code == 403 and "websites" in message_of(answer), origin
    assert upload(server, headers={"origin": server.url}).status_code == 200


def test_allowed_origins_may_upload(tokenizer: Tokenizer) -> None:
    origin = "https://page.example"
    config = ServerConfig(port=0, batch_store=SIZE, allowed_origins=(origin,))
    with running(FakeEngine(tokenizer), config) as server:
        assert upload(server, headers={"origin": origin}).status_code == 200
        assert upload(server, headers={"origin": "https://evil.example"}).status_code == 403


def test_without_the_option_there_are_no_files(tokenizer: Tokenizer) -> None:
    paths = (
        ("GET", "files"),
        ("POST", "files"),
        ("GET", "files/file-0"),
        ("DELETE", "files/file-0"),
        ("GET", "files/file-0/content"),
        ("GET", "batches"),
        ("POST", "batches"),
        ("GET", "batches/batch_0"),
        ("POST", "batches/batch_0/cancel"),
    )
    with running(FakeEngine(tokenizer)) as server:
        for method, path in paths:
            answer = server.client.request(method, f"/v1/{path}")
            assert answer.status_code == 404 and "--batch-store" in message_of(answer)


def test_a_key_sees_only_its_own_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text("key-a: alice\nkey-b: bob\nkey-c: alice\n")
    config = ServerConfig(port=0, batch_store=SIZE, api_key=("one", "two"), tenant_keys=str(keys))
    with running(FakeEngine(tokenizer), config) as server:
        own = {}
        for key in ("one", "two", "key-a", "key-b", "key-c"):
            headers = {"authorization": f"Bearer {key}"}
            own[key] = upload(server, b"x" * (SIZE - 10), headers=headers).json()["id"]
        for key, file in own.items():
            with client_of(server, key) as client:
                assert [each.id for each in client.files.list()] == [file]
                for other in set(own.values()) - {file}:
                    for call in (
                        client.files.retrieve,
                        client.files.content,
                        client.files.delete,
                    ):
                        with pytest.raises(openai.NotFoundError):
                            call(other)
                client.files.delete(file)
        folder = folder_of(server)
        assert folder.stat().st_mode & 0o777 == 0o700
    assert not folder.exists()


def test_a_stopping_server_takes_no_files(tokenizer: Tokenizer) -> None:
    with running(FakeEngine(tokenizer), ServerConfig(port=0, batch_store=SIZE)) as server:
        server.service.requests.draining = True
        answer = upload(server)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "shutting_down"
