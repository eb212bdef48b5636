"""Ids of the Hugging Face hub, with its library replaced: what is asked of it, and what is said
when it fails."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file

from pagedkv.weights import open_checkpoint, read_config
from pagedkv.weights.hub import is_hub_id

COMMIT = "0123456789abcdef"


class Hub:
    """A hub with one model; remembers (id, revision, patterns) of each call."""

    def __init__(self, folder: Path, files: dict[str, bytes]) -> None:
        self.folder = folder / COMMIT
        self.files = files
        self.calls: list[tuple[str, str | None, list[str]]] = []

    def __call__(self, repo_id: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        self.calls.append((repo_id, revision, allow_patterns))
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            if name in allow_patterns:
                (self.folder / name).write_bytes(content)
        return str(self.folder)


def weights(folder: Path, name: str) -> bytes:
    save_file({name: torch.ones(2)}, folder / "scratch")
    return (folder / "scratch").read_bytes()


def use(hub: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub)


def test_a_sharded_model_is_fetched_by_its_index_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = {"weight_map": {"a": "m-1.safetensors", "b": "m-2.safetensors"}}
    hub = Hub(
        tmp_path,
        {
            "config.json": b'{"x": 1}',
            "model.safetensors.index.json": json.dumps(index).encode(),
            "m-1.safetensors": weights(tmp_path, "a"),
            "m-2.safetensors": weights(tmp_path, "b"),
            "other.safetensors": weights(tmp_path, "c"),
            "pytorch_model.bin": b"\x80\x04K\x01.",
            "modeling.py": b"raise SystemExit",
        },
    )
    use(hub, monkeypatch)
    checkpoint = open_checkpoint("owner/some-model")
    assert checkpoint.config == {"x": 1}
    assert sorted(name for name, _ in checkpoint.tensors()) == ["a", "b"]
    assert [call[:2] for call in hub.calls] == [
        ("owner/some-model", None),
        ("owner/some-model", COMMIT),  # both of one commit
    ]
    assert set(hub.calls[1][2]) - set(hub.calls[0][2]) == {"m-1.safetensors", "m-2.safetensors"}
    assert not any("*" in one or one.endswith((".py", ".bin")) for one in hub.calls[1][2])


def test_a_model_in_one_file_needs_no_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path, {"config.json": b"{}", "model.safetensors": weights(tmp_path, "only")})
    use(hub, monkeypatch)
    assert open_checkpoint("owner/m").tensor_names == ("only",)
    assert set(hub.calls[1][2]) - set(hub.calls[0][2]) == {"model.safetensors"}


def test_a_model_without_safetensors_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(Hub(tmp_path, {"config.json": b"{}", "pytorch_model.bin": b"x"}), monkeypatch)
    with pytest.raises(ValueError, match="only safetensors are read, never pickled weights"):
        open_checkpoint("owner/m")


def test_an_index_with_paths_fetches_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = b'{"weight_map": {"a": "../x.safetensors"}}'
    hub = Hub(tmp_path, {"config.json": b"{}", "model.safetensors.index.json": index})
    use(hub, monkeypatch)
    with pytest.raises(ValueError, match=r"is not the plain name of a \.safetensors file"):
        open_checkpoint("owner/m")
    assert len(hub.calls) == 1


def test_what_the_hub_says_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> str:
        raise ConnectionError("Cannot reach it.\nMore lines")

    use(fails, monkeypatch)
    message = r"no path of that name, and .* hub: ConnectionError: Cannot reach it\.$"
    with pytest.raises(RuntimeError, match=message):
        open_checkpoint("owner/m")


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The library itself without a network; returns where its cache is."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_without_a_network_the_librarys_cache_is_used(offline: Path) -> None:
    model = offline / "models--owner--m"
    snapshot = model / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text('{"x": 2}')
    (model / "blobs").mkdir()
    (model / "blobs" / "1").write_bytes(weights(offline, "only"))
    (snapshot / "model.safetensors").symlink_to(model / "blobs" / "1")
    checkpoint = open_checkpoint("owner/m")
    assert checkpoint.config == {"x": 2}
    assert [name for name, _ in checkpoint.tensors()] == ["only"]


def test_without_a_network_a_model_that_is_not_there_is_told_so(offline: Path) -> None:
    message = "no model 'owner/m': there is no path of that name, and .* hub: LocalEntryNotFound"
    with pytest.raises(RuntimeError, match=message):
        open_checkpoint("owner/m")


def test_a_path_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **options: Any) -> str:
        raise AssertionError("asked")

    use(fails, monkeypatch)
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "owner" / "m"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights(tmp_path, "here"))
    assert open_checkpoint("owner/m").tensor_names == ("here",)


@pytest.mark.parametrize(
    ("name", "is_id"),
    [
        ("Qwen/Qwen3-0.6B", True),
        ("owner/m", True),
        ("m", False),
        ("a/b/c", False),
        ("../m", False),
        ("owner/..", False),
        ("owner/a..b", False),
        ("owner/.hidden", False),
        ("./m", False),
        ("/abs/m", False),
        ("owner/m\n", False),
        ("owner/" + "x" * 97, False),
        ("https://host/m", False),
    ],
)
def test_an_id_is_an_owner_and_a_name(name: str, is_id: bool) -> None:
    assert is_hub_id(name) is is_id


def test_of_a_model_that_is_only_described_the_config_alone_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub = Hub(tmp_path, {"config.json": b'{"x": 1}', "model.safetensors": b"not read"})
    use(hub, monkeypatch)
    assert read_config("owner/m") == {"x": 1}
    assert hub.calls == [("owner/m", None, ["config.json"])]
    (tmp_path / COMMIT / "model.safetensors").write_bytes(b"not read")
    assert read_config(tmp_path / COMMIT) == read_config(tmp_path / COMMIT / "config.json")
    with pytest.raises(ValueError, match="a path of that name does not exist"):
        read_config(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"is neither a .gguf nor a .json file"):
        read_config(tmp_path / COMMIT / "model.safetensors")
    with pytest.raises(TypeError, match="model must be a name or a path, got int 3"):
        read_config(3)  # type: ignore[arg-type]
