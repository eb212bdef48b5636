"""Directories of safetensors: the index is an allow-list, and disagreement is an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagedkv.weights import open_checkpoint

INDEX = "model.safetensors.index.json"
TENSORS = {f"t{i}": torch.full((2, 3), float(i)) for i in range(5)}
SHARDS = {
    "model-00001-of-00002.safetensors": ["t0", "t1", "t2"],
    "model-00002-of-00002.safetensors": ["t3", "t4"],
}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    for shard, names in SHARDS.items():
        save_file({name: TENSORS[name] for name in names}, tmp_path / shard)
    write_index(tmp_path, {name: shard for shard, names in SHARDS.items() for name in names})
    return tmp_path


def write_index(path: Path, weight_map: object) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def index_of(path: Path) -> dict[str, str]:
    weight_map: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
    return weight_map


def test_all_shards_are_read(sharded: Path) -> None:
    (sharded / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = open_checkpoint(sharded)
    assert checkpoint.path == checkpoint.tokenizer_source == sharded
    assert checkpoint.config == {"model_type": "llama"}
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    found = dict(checkpoint.tensors())
    assert sorted(found) == sorted(checkpoint.tensor_names) == sorted(TENSORS)
    assert all(torch.equal(found[name], tensor) for name, tensor in TENSORS.items())


def test_a_single_file_needs_no_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file(TENSORS, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(str(tmp_path))
    assert sorted(dict(checkpoint.tensors())) == sorted(TENSORS)
    assert checkpoint.generation_config == {}


def test_a_file_that_the_index_does_not_name_is_not_opened(sharded: Path) -> None:
    (sharded / "model.safetensors").write_bytes(b"an older, broken file")
    assert sorted(dict(open_checkpoint(sharded).tensors())) == sorted(TENSORS)


def test_linked_files_are_followed_as_the_hubs_cache_has_them(sharded: Path) -> None:
    blobs = sharded / "blobs"
    blobs.mkdir()
    for shard in SHARDS:
        (sharded / shard).rename(blobs / shard)
        (sharded / shard).symlink_to(blobs / shard)
    assert sorted(dict(open_checkpoint(sharded).tensors())) == sorted(TENSORS)


def test_missing_shards_are_counted_and_named(sharded: Path) -> None:
    weights = {f"t{i}": f"model-{i:05}-of-00030.safetensors" for i in range(30)}
    write_index(sharded, weights)
    for i in range(15):
        save_file({f"t{i}": torch.ones(1)}, sharded / weights[f"t{i}"])
    with pytest.raises(ValueError, match="names 30 files, of which 15 are missing") as caught:
        open_checkpoint(sharded)
    assert "model-00015-of-00030.safetensors, model-00016" in str(caught.value)
    assert str(caught.value).endswith("and 7 more")


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    write_index(sharded, {**index_of(sharded), "t9": "model-00002-of-00002.safetensors"})
    with pytest.raises(ValueError, match=r"00002\.safetensors lacks tensors that the index .*: t9"):
        open_checkpoint(sharded)


def test_a_tensor_that_the_index_does_not_list_is_named(sharded: Path) -> None:
    index = index_of(sharded)
    del index["t1"]
    write_index(sharded, index)
    with pytest.raises(ValueError, match="that the index does not list there: t1"):
        open_checkpoint(sharded)


def test_a_tensor_in_two_shards_is_named(sharded: Path) -> None:
    save_file({name: TENSORS[name] for name in ("t0", "t3", "t4")}, sharded / list(SHARDS)[1])
    with pytest.raises(ValueError, match="that the index does not list there: t0"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    "shard",
    [
        "../model.safetensors",
        "/etc/model.safetensors",
        "sub/model.safetensors",
        "sub\\model.safetensors",
        "..safetensors",
        ".safetensors",
        "model.bin",
        "model.safetensors\n",
        "model.safetensors\0.safetensors",
        "",
        7,
        None,
    ],
)
def test_a_shard_is_a_plain_name(sharded: Path, shard: object) -> None:
    write_index(sharded, {**index_of(sharded), "t0": shard})
    with pytest.raises(ValueError, match=r"tensor 't0' lies in .*, which is not the plain name"):
        open_checkpoint(sharded)


def test_an_index_that_gives_a_tensor_to_two_files_is_refused(sharded: Path) -> None:
    index = (sharded / INDEX).read_text()
    last = list(SHARDS)[1]
    (sharded / INDEX).write_text(index.replace('"t0":', f'"t0": "{last}", "t0":'))
    with pytest.raises(ValueError, match="is not valid JSON: the name 't0' appears twice"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("weight_map", [{}, [], None, "model.safetensors"])
def test_an_index_without_a_map_is_refused(sharded: Path, weight_map: object) -> None:
    write_index(sharded, weight_map)
    with pytest.raises(ValueError, match=r"index.json: weight_map is"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "is not valid JSON"),
        (b"\xff\xfe", "is not valid JSON"),
        (b"[" * 200_000, "is not valid JSON"),
        (b'{"x": ' + b"1" * 5000 + b"}", "is not valid JSON: Exceeds the limit"),
        (b'{"a": 1, "b": [{"c": 1, "c": 1}]}', "is not valid JSON: the name 'c' appears twice"),
        (b'{"weight_map": {}, "weight_map": {}}', "is not valid JSON: the name 'weight_map' app"),
        (b"[1]", "holds a list, not an object"),
        (b'"x"', "holds a str, not an object"),
    ],
)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
def test_malformed_json_is_refused(sharded: Path, file: str, content: bytes, message: str) -> None:
    (sharded / file).write_bytes(content)
    with pytest.raises(ValueError, match=f"{file} {message}"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", INDEX])
def test_a_folder_in_the_place_of_a_file_is_refused(sharded: Path, file: str) -> None:
    (sharded / file).unlink(missing_ok=True)
    (sharded / file).mkdir()
    with pytest.raises(ValueError, match=f"{file} cannot be read"):
        open_checkpoint(sharded)


def test_a_huge_json_file_is_refused_unread(sharded: Path) -> None:
    with (sharded / "config.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ValueError, match=r"config\.json is larger than"):
        open_checkpoint(sharded)


def test_a_file_without_end_is_refused(sharded: Path) -> None:
    (sharded / "config.json").unlink()
    (sharded / "config.json").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match=r"config\.json is larger than"):
        open_checkpoint(sharded)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json is missing"):
        open_checkpoint(tmp_path)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(ValueError, match="only safetensors are read, never pickled weights"):
        open_checkpoint(tmp_path)


def test_several_files_without_an_index_are_ambiguous(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("b.safetensors", "a.safetensors"):
        save_file(TENSORS, tmp_path / name)
    with pytest.raises(ValueError, match=r"holds a\.safetensors, b\.safetensors but neither"):
        open_checkpoint(tmp_path)


def test_a_file_cut_after_it_was_opened_is_one_clear_error(sharded: Path) -> None:
    checkpoint = open_checkpoint(sharded)
    shard = sharded / list(SHARDS)[1]
    shard.write_bytes(shard.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"model-00002-of-00002\.safetensors: "):
        list(checkpoint.tensors())
