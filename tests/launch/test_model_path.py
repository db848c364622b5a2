"""A model that is nowhere: the key, the place that was looked at, and what to do, without a library's own words."""

import os
from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub.errors import RepositoryNotFoundError
from omegaconf import OmegaConf

from verl_tim.launch import start
from verl_tim.launch.checks.model import KEY, TOKENIZER_KEY, check_model, check_tokenizer
from verl_tim.launch.errors import LaunchError


@pytest.fixture
def hub(monkeypatch):
    """What the hub answers when it is asked for a model."""

    def answers(error):
        def model_info(self, name, **kwargs):
            raise error

        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)

    return answers


def refused(config):
    with pytest.raises(LaunchError) as error:
        start._check(config, True)
    (finding,) = error.value.findings
    return finding


@pytest.mark.parametrize("key", [KEY, TOKENIZER_KEY])
def test_a_folder_that_is_not_there(config_of, tmp_path, key):
    finding = refused(config_of(f"{key}={tmp_path}/models/none"))
    assert finding.key == key
    assert finding.problem == f"there is no folder {tmp_path}/models/none"
    assert "give a folder in Hugging Face format or OWNER/NAME of the hub" in finding.remedy


def test_a_file_in_its_place(config_of, tmp_path):
    (tmp_path / "model").write_text("")
    assert refused(config_of(f"{KEY}={tmp_path}/model")).problem == f"{tmp_path}/model is no folder"


@pytest.mark.parametrize("key", [KEY, TOKENIZER_KEY])
def test_a_home_is_expanded_before_verl_sees_it(config_of, tmp_path, monkeypatch, model_folder, key):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert refused(config_of(f"{key}='~/models/none'")).problem == f"there is no folder {tmp_path}/models/none"
    (tmp_path / "tiny").symlink_to(model_folder)
    config = config_of(f"{key}='~/tiny'")
    assert OmegaConf.select(config, key) == f"{tmp_path}/tiny"
    start._check(config, True)


@pytest.mark.parametrize("key", [KEY, TOKENIZER_KEY])
def test_a_home_of_nobody_is_no_folder(config_of, key):
    assert refused(config_of(f"{key}='~nobody_xyz/m'")).problem == f"there is no folder {Path.cwd()}/~nobody_xyz/m"


def test_a_home_of_nobody_in_an_override_is_answered_too(resolved):
    with pytest.raises(LaunchError) as error:
        resolved("model=hf", f"{KEY}=~nobody_xyz/m")
    (finding,) = error.value.findings
    assert finding.key == KEY
    assert finding.remedy == f"nobody here has that home; write {KEY}=/FOLDER"


def test_a_name_that_the_hub_cannot_be_asked_for(config_of, hub):
    hub(httpx.ConnectError("Name or service not known"))
    finding = refused(config_of(f"{KEY}=nobody/out-of-reach"))
    assert finding.key == KEY
    assert finding.problem == (
        f"there is no folder {Path.cwd()}/nobody/out-of-reach, and the hub cannot be asked for nobody/out-of-reach "
        "(ConnectError: Name or service not known)"
    )
    assert "hf download nobody/out-of-reach" in finding.remedy


def test_a_name_that_the_hub_does_not_know(config_of, hub):
    response = httpx.Response(404, request=httpx.Request("GET", "https://hub"))
    hub(RepositoryNotFoundError("404: no such repository", response=response))
    finding = refused(config_of(f"{KEY}=nobody/unknown"))
    assert "and the hub does not give nobody/unknown (RepositoryNotFoundError: 404: no such" in finding.problem


def test_what_another_machine_or_the_start_has_is_not_looked_for(config_of):
    for path in ("hdfs://store/model", "null"):
        config = config_of(f"{KEY}={path}")
        assert [*check_model(config), *check_tokenizer(config)] == []


def test_a_home_in_an_override_is_answered_with_what_to_write(resolved):
    with pytest.raises(LaunchError) as error:
        resolved("model=hf", f"{KEY}=~/models/mine")
    (finding,) = error.value.findings
    assert finding.key == KEY
    assert finding.remedy == f"write {KEY}={os.path.expanduser('~/models/mine')}"
