"""A made model goes to another machine in parts, and is found there instead of being made."""

import json
import shutil

import pytest
from typer.testing import CliRunner

from tests.tasks.test_base_model import make
from verl_tim.cli import app
from verl_tim.tasks import base_model, parts
from verl_tim.tasks.artifact import content_key, file_sha256, make_once
from verl_tim.tasks.base_model import CARD
from verl_tim.tasks.errors import InputError
from verl_tim.tasks.parts import MIB, models_in, pack_model, unpack_models

KIB = 1 / 1024


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A small real one, in a cache."""
    return make("qwen3", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def packed(model, tmp_path_factory):
    return pack_model(model, tmp_path_factory.mktemp("out"), mib=64 * KIB)


def other_weights(model, cache):
    """The same settings, other weights: as made on another kind of machine."""
    spec = json.loads((model / CARD).read_text())["spec"]

    def build(work):
        shutil.copytree(model, work, dirs_exist_ok=True)
        (work / CARD).unlink()
        weights = bytearray((work / "model.safetensors").read_bytes())
        weights[-1] ^= 1
        (work / "model.safetensors").write_bytes(weights)
        return {}

    return make_once(cache / "models" / model.name, CARD, spec, build)


def test_the_next_machine_finds_it_and_makes_none(model, packed, tmp_path, monkeypatch):
    assert len(packed) > 2
    assert all(path.stat().st_size <= 64 * KIB * MIB for path in packed)
    (written,) = unpack_models(packed, tmp_path).written
    assert {path.name: file_sha256(path) for path in written.iterdir()} == {
        path.name: file_sha256(path) for path in model.iterdir()
    }
    monkeypatch.setattr(base_model, "_build", lambda *_, **__: pytest.fail("it was made a second time"))
    assert make("qwen3", tmp_path) == written
    again = unpack_models(packed, tmp_path)
    assert (again.written, again.kept, again.not_found_here) == ((), (written,), {})


def test_any_order_and_a_part_twice(packed, tmp_path):
    copy = shutil.copy(packed[0], tmp_path)
    assert unpack_models([*reversed(packed), tmp_path / copy], tmp_path / "cache").written


def test_two_models_in_one_call(model, packed, tmp_path):
    moe = make("qwen3_moe", tmp_path / "a")
    both = [*packed, *pack_model(moe, tmp_path / "out")]
    assert {path.name for path in unpack_models(both, tmp_path / "b").written} == {model.name, moe.name}
    assert models_in(tmp_path / "b") == sorted(unpack_models(both, tmp_path / "b").kept)


def test_a_missing_part_is_named_and_nothing_is_written(packed, tmp_path):
    with pytest.raises(InputError, match=rf"of its {len(packed)} parts, number 2 is not among"):
        unpack_models([*packed[:1], *packed[2:]], tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("change", [lambda b: b[:-1], lambda b: b + b"x", lambda b: b[:-9] + b"?" + b[-8:]])
def test_a_damaged_part_is_named(packed, tmp_path, change):
    bad = tmp_path / packed[1].name
    bad.write_bytes(change(packed[1].read_bytes()))
    with pytest.raises(InputError, match=rf"{bad}: is damaged, or was cut off"):
        unpack_models([packed[0], bad, *packed[2:]], tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_what_is_no_part_is_refused(packed, tmp_path):
    (tmp_path / "other").write_bytes(b"\x1f\x8b" * 4000)
    with pytest.raises(InputError, match="is no part of"):
        unpack_models([*packed, tmp_path / "other"], tmp_path / "cache")
    (tmp_path / "torn").write_bytes(packed[0].read_bytes()[:60])
    with pytest.raises(InputError, match="damaged in its first line"):
        unpack_models([tmp_path / "torn"], tmp_path / "cache")


def test_parts_of_two_packings_do_not_mix(model, packed, tmp_path):
    others = pack_model(other_weights(model, tmp_path / "a"), tmp_path / "out", mib=64 * KIB)
    with pytest.raises(InputError, match="two packings"):
        unpack_models([packed[0], *others[1:]], tmp_path / "cache")
    smaller = pack_model(model, tmp_path / "smaller", mib=32 * KIB)
    with pytest.raises(InputError, match="two packings"):
        unpack_models([*packed, smaller[0]], tmp_path / "cache")


def test_other_weights_under_the_same_key_are_not_taken_for_these(model, packed, tmp_path):
    there = other_weights(model, tmp_path)
    before = file_sha256(there / "model.safetensors")
    with pytest.raises(InputError, match=r"same settings with other content \(model.safetensors\)"):
        unpack_models(packed, tmp_path)
    assert file_sha256(there / "model.safetensors") == before


def test_a_card_that_does_not_fit_what_it_describes_is_refused(model, tmp_path):
    forged = tmp_path / model.name
    shutil.copytree(model, forged)
    card = json.loads((forged / CARD).read_text())
    card["spec"]["seed"] += 1
    (forged / CARD).write_text(json.dumps(card))
    with pytest.raises(InputError, match="another model than"):
        unpack_models(pack_model(forged, tmp_path / "out"), tmp_path / "cache")
    assert content_key(card["spec"]) != card["key"]


def test_a_model_whose_files_changed_is_not_packed(model, tmp_path):
    changed = tmp_path / model.name
    shutil.copytree(model, changed)
    (changed / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"config\.json changed since it was made"):
        pack_model(changed, tmp_path / "out")
    with pytest.raises(InputError, match="no model"):
        models_in(tmp_path / "none")


def test_an_earlier_packing_goes_when_the_new_one_stands(model, tmp_path):
    pack_model(model, tmp_path, mib=32 * KIB)
    (tmp_path / "kept.txt").write_text("")
    new = pack_model(model, tmp_path, mib=64 * KIB)
    assert sorted(tmp_path.iterdir()) == sorted([*new, tmp_path / "kept.txt"])


def test_other_versions_are_told_since_its_key_has_them(packed, tmp_path, monkeypatch):
    monkeypatch.setattr(parts, "version", lambda name: "0.0")
    (told,) = unpack_models(packed, tmp_path).not_found_here.values()
    assert "torch" in told
    assert "(here 0.0)" in told


def test_the_two_commands(model, tmp_path):
    run = CliRunner().invoke
    words = ["evidence", "pack-models", "--cache-dir", model.parent.parent, "--out", tmp_path / "out", "--json"]
    result = run(app, list(map(str, words)))
    assert result.exit_code == 0, result.stderr
    files = list(json.loads(result.stdout)["files"])
    result = run(app, ["evidence", "unpack-models", *files, "--cache-dir", str(tmp_path / "cache")])
    assert result.exit_code == 0, result.stderr
    assert f"{model.name}  written" in result.stdout.replace("\n", "")
    assert run(app, [*map(str, words), "--only", "none*"]).exit_code == 2
