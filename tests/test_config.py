"""Settings that cannot be met are refused with the name, the value and what would be accepted."""

import pytest

from fimaq.config import METHODS, Config, read_config_file
from fimaq.errors import InputError


@pytest.mark.parametrize(("bits", "weight", "activation"), [("w3a3", 3, 3), ("W8A4", 8, 4), ("w2a8", 2, 8)])
def test_bits_are_read(bits, weight, activation):
    config = Config.create(bits=bits)
    assert (config.weight_bits, config.activation_bits) == (weight, activation)


@pytest.mark.parametrize("bits", ["w1a4", "w4a9", "4", "w4", "a4w4", "w4a4 ", "w16a16", ""])
def test_impossible_bits_are_refused(bits):
    with pytest.raises(InputError) as error:
        Config.create(bits=bits)
    assert str(error.value) == f"bits: {bits!r} is not of the form wXaY with X and Y from 2 to 8, such as w4a4"


@pytest.mark.parametrize("method", ["fima-q", "lowrank"])
def test_more_ranks_than_iterations_are_refused(method):
    with pytest.raises(InputError, match=r"rank 20 is larger than iters 10: .*give a rank of at most 10"):
        Config.create(method=method, rank=20, iters=10)


def test_as_many_ranks_as_iterations_are_accepted():
    assert Config.create(rank=10, iters=10).resolved_rank == 10


@pytest.mark.parametrize("method", ["rtn", "qdrop", "brecq", "diag", "rank1"])
def test_methods_without_ranks_have_one(method):
    assert Config.create(method=method, rank=20, iters=10).resolved_rank == 1


def test_the_rank_is_the_papers_unless_the_run_is_short():
    assert Config.create(iters=20000).resolved_rank == 15
    assert 1 <= Config.create(iters=10).resolved_rank < 15


@pytest.mark.parametrize(
    ("other", "named"), [({"preset": "released"}, "preset deploy"), ({"task": "detection"}, "detectors")]
)
def test_bits_are_kept_exact_only_where_there_is_an_export(other, named):
    with pytest.raises(InputError, match=f"bit_exact is for what is exported.*{named}"):
        Config.create(bit_exact=True, **other)


def test_a_batch_larger_than_the_calibration_set_is_refused():
    with pytest.raises(InputError, match=r"batch_size 64 is larger than calib_size 16: .*at most 16 images"):
        Config.create(batch_size=64, calib_size=16)


@pytest.mark.parametrize(("given", "batch"), [({"calib_size": 5}, 5), ({"calib_size": 100}, 32), ({}, 32)])
def test_few_images_are_one_batch_where_none_was_asked_for(given, batch):
    assert Config.create(**given).batch_size == batch


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GiB", 2**32), ("0.5 gib", 2**29), ("800MB", 8 * 10**8), ("2g", 2 * 10**9), ("4096", 4096), (4096, 4096)],
)
def test_an_amount_of_memory_is_read(text, size):
    assert Config.create(memory_budget=text).memory_budget == size
    assert Config.create(host_budget=text).host_budget == size


@pytest.mark.parametrize("text", ["much", "4 apples", "GiB", "-1GiB", "1.2.3GB", "0", 0, "4", 4])
def test_an_impossible_amount_of_memory_is_refused(text):
    with pytest.raises(InputError, match=r"^memory_budget: .*"):
        Config.create(memory_budget=text)


def test_an_unknown_setting_is_refused_with_the_known_ones():
    with pytest.raises(InputError, match=r"unknown setting 'iterations': known are .*\biters\b"):
        Config.create(iterations=100)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("iters", 0),
        ("iters", "many"),
        ("calib_size", -1),
        ("alpha", 1.5),
        ("damping", -0.1),
        ("drop_probability", -0.1),
        ("warmup", 1.0),
        ("crop_pct", 0),
        ("temperature", 0),
        ("seed", -1),
        ("method", "adaround"),
        ("preset", "fast"),
        ("precision", "fp16"),
    ],
)
def test_a_value_outside_of_what_is_accepted_is_named(key, value):
    with pytest.raises(InputError) as error:
        Config.create(**{key: value})
    assert str(error.value).startswith(f"{key}: ")
    assert f"(got {value!r})" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "damping", "relative"),
    [
        ({}, 0, True),
        ({"method": "qdrop"}, 0, False),
        ({"damping": 0.2}, 0.2, True),
        ({"task": "detection"}, 0.5, False),
        ({"task": "detection", "damping": 0}, 0, False),
    ],
)
def test_a_detector_is_learned_and_searched_by_plain_errors_too(settings, damping, relative):
    config = Config.create(**settings)
    assert (config.resolved_damping, config.relative_errors) == (damping, relative)


def test_an_unknown_method_brings_the_known_ones():
    with pytest.raises(InputError) as error:
        Config.create(method="fimaq")
    assert all(method in str(error.value) for method in METHODS)


def test_every_mistake_is_reported_at_once():
    with pytest.raises(InputError, match=r"(?s)iters: .*; seed: .*; unknown setting 'x'"):
        Config.create(iters=0, seed=-1, x=1)


def test_a_config_cannot_be_changed():
    config = Config.create()
    with pytest.raises(ValueError, match="frozen"):
        config.iters = 5


def test_a_config_survives_json():
    config = Config.create(model="vit_tiny_patch16_224", calib="images", bits="w3a3", model_args={"img_size": 64})
    assert Config.model_validate_json(config.model_dump_json()) == config


def test_a_yaml_file_holds_the_keys_of_the_flags(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: vit_tiny_patch16_224\nbits: w3a3\ncalib-size: 64\nmodel_args: {img_size: 64}\n")
    config = Config.create(**read_config_file(path))
    assert (config.model, config.bits, config.calib_size) == ("vit_tiny_patch16_224", "w3a3", 64)
    assert config.model_args == {"img_size": 64}


def test_an_empty_yaml_file_sets_nothing(tmp_path):
    (tmp_path / "run.yaml").write_text("# all defaults\n")
    assert read_config_file(tmp_path / "run.yaml") == {}


def test_an_unknown_key_in_a_file_is_refused(tmp_path):
    (tmp_path / "run.yaml").write_text("itres: 5\n")
    with pytest.raises(InputError, match="unknown setting 'itres'"):
        Config.create(**read_config_file(tmp_path / "run.yaml"))


@pytest.mark.parametrize("text", ["- a\n- b\n", "just words", "3: 4\n"])
def test_a_file_without_keys_is_refused(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(InputError, match=r"run\.yaml must hold 'key: value' lines"):
        read_config_file(tmp_path / "run.yaml")


@pytest.mark.parametrize("content", [b"a: [1, 2", b"\xff\xfe\x00", b"a: !!python/object/apply:os.getcwd []"])
def test_a_file_that_is_not_plain_yaml_is_refused(tmp_path, content):
    (tmp_path / "run.yaml").write_bytes(content)
    with pytest.raises(InputError, match=r"run\.yaml cannot be read"):
        read_config_file(tmp_path / "run.yaml")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"nothing\.yaml cannot be read"):
        read_config_file(tmp_path / "nothing.yaml")
