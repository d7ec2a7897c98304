import json

import pytest
from refusals import refused

from nemo_rl_mcore.data.hub import fetched_folder


@pytest.fixture
def snapshot(tmp_path, monkeypatch):
    """The snapshot of `me/model` in a cache, with a config and nothing else, on a machine without a network."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    model = tmp_path / "models--me--model"
    folder = model / "snapshots/abc"
    folder.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs/main").write_text("abc")
    (folder / "config.json").write_text("{}")
    return folder


def test_a_local_folder_is_taken_as_it_is(tmp_path):
    assert fetched_folder(str(tmp_path)) == tmp_path


def test_a_whole_snapshot_needs_no_network(snapshot):
    (snapshot / "model.safetensors").touch()
    assert fetched_folder("me/model") == snapshot


def test_a_snapshot_is_whole_when_every_file_of_its_index_is_there(snapshot):
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (snapshot / files["a"]).touch()
    with refused("incomplete-model", "me/model"):
        fetched_folder("me/model")
    (snapshot / files["b"]).touch()
    assert fetched_folder("me/model") == snapshot


@pytest.mark.parametrize("name", ["me/model", "me/unknown"])
def test_what_cannot_be_fetched_is_named_with_the_way_out(snapshot, name):
    with refused("incomplete-model", f"policy.model_name: '{name}'"):
        fetched_folder(name)
