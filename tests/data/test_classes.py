import json

import pytest
from timm.data import ImageNetInfo

from fimaq.data import data_folders, map_classes, validation_set
from fimaq.errors import InputError


def test_a_few_wnids_keep_their_imagenet_indices():
    mapping = map_classes(["n01440764", "n15075141"], 1000)
    assert mapping.indices == {"n01440764": 0, "n15075141": 999}
    assert mapping.source == "ImageNet-1k synsets carried by timm"


@pytest.mark.parametrize(
    ("num_classes", "subset"),
    [(11821, "imagenet-12k"), (21841, "imagenet-22k"), (21843, "imagenet-21k-goog")],
)
def test_larger_imagenets_use_their_own_synset_list(num_classes, subset):
    mapping = map_classes(["n01440764"], num_classes)
    assert ImageNetInfo(subset).index_to_label_name(mapping.indices["n01440764"]) == "n01440764"


def test_a_wnid_outside_the_models_imagenet_is_named():
    with pytest.raises(InputError, match=r"ImageNet-1k: n00004475; .*--class-map"):
        map_classes(["n01440764", "n00004475"], 1000)


def test_wnids_of_a_ten_class_model_are_ranked_only_when_all_are_there():
    folders = ["n03888257", "n01440764", "n02102040"]
    mapping = map_classes(folders, 3)
    assert mapping.indices == {"n01440764": 0, "n02102040": 1, "n03888257": 2}
    assert mapping.source == "all 3 folders in sorted order"
    with pytest.raises(InputError, match=r"n03888257.*10 classes.*--class-map"):
        map_classes(folders, 10)


def test_one_folder_that_was_renamed_is_named():
    with pytest.raises(
        InputError, match=r"2 of 3 class folders have ImageNet names .* and tench has none.*--class-map"
    ):
        map_classes(["n03888257", "n02102040", "tench"], 3)


def test_integer_names_are_class_indices():
    assert map_classes(["3", "07"], 10).indices == {"3": 3, "07": 7}


@pytest.mark.parametrize("folders", [["3", "10"], ["1", "01"]], ids=["out of range", "twice the same"])
def test_integer_names_that_cannot_be_indices_are_refused(folders):
    with pytest.raises(InputError, match=folders[1]):
        map_classes(folders, 10)


def test_integer_names_with_two_possible_orders_are_refused():
    folders = [str(index) for index in range(12)]
    with pytest.raises(InputError, match=r"10 before 2.*--class-map"):
        map_classes(folders, 12)
    padded = [f"{index:02d}" for index in range(12)]
    assert map_classes(padded, 12).indices["10"] == 10


def test_the_models_own_label_names_map_a_part_of_its_classes():
    mapping = map_classes(["cat", "ant"], 3, pretrained_cfg={"label_names": ["dog", "cat", "ant"]})
    assert mapping.indices == {"cat": 1, "ant": 2}
    with pytest.raises(InputError, match="cat"):  # labels of another head say nothing about this one
        map_classes(["cat", "ant"], 5, pretrained_cfg={"label_names": ["dog", "cat", "ant"]})


def test_an_explicit_class_map_wins(tmp_path):
    file = tmp_path / "map.json"
    file.write_text(json.dumps({"n01440764": 7, "other": 2, "unused": 1}))
    mapping = map_classes(["n01440764", "other"], 1000, class_map=file)
    assert mapping.indices == {"n01440764": 7, "other": 2}
    assert str(file) in mapping.source


@pytest.mark.parametrize(
    ("class_map", "message"),
    [
        ({"a": 0}, "no index for b"),
        ({"a": 0, "b": 5}, "b: 5"),
        ({"a": True, "b": 1}, "a: True"),
        ({"a": "0", "b": 1}, "'0'"),
    ],
)
def test_a_class_map_that_does_not_fit_says_where(class_map, message):
    with pytest.raises(InputError, match=message):
        map_classes(["a", "b"], 5, class_map=class_map)


@pytest.mark.parametrize("content", ["{", "[1, 2]", None], ids=["not JSON", "a list", "no file"])
def test_a_class_map_file_that_cannot_be_used_is_named(tmp_path, content):
    file = tmp_path / "map.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError, match=r"map\.json"):
        map_classes(["a"], 5, class_map=file)


def test_a_validation_folder_gives_labelled_images_in_sorted_order(tmp_path, make_images, transform):
    for name in ("dog", "cat"):
        make_images(tmp_path / name, 2)
    (tmp_path / "no images here").mkdir()
    dataset, mapping = validation_set(tmp_path, 2, transform)
    assert [(path.parent.name, path.name, target) for path, target in dataset.samples] == [
        ("cat", "00.png", 0),
        ("cat", "01.png", 0),
        ("dog", "00.png", 1),
        ("dog", "01.png", 1),
    ]
    assert mapping.indices == {"cat": 0, "dog": 1}


def test_a_flat_validation_folder_is_told_the_layout(tmp_path, make_images, transform):
    make_images(tmp_path / "flat", 2)
    (tmp_path / "hollow" / "class").mkdir(parents=True)
    with pytest.raises(InputError, match=r"00\.png.*one folder per class"):
        validation_set(tmp_path / "flat", 2, transform)
    with pytest.raises(InputError, match=r"no class folders.*one folder per class"):
        validation_set(tmp_path / "hollow", 2, transform)


def test_a_data_folder_is_split_into_train_and_val(tmp_path):
    with pytest.raises(InputError, match="gone"):
        data_folders(tmp_path / "gone")
    with pytest.raises(InputError, match="'train'"):
        data_folders(tmp_path)
    assert data_folders(tmp_path, needs_train=False) == (tmp_path / "train", None)
    (tmp_path / "train").mkdir()
    assert data_folders(tmp_path) == (tmp_path / "train", None)
    (tmp_path / "val").mkdir()
    assert data_folders(tmp_path) == (tmp_path / "train", tmp_path / "val")


@pytest.mark.shared
def test_the_quick_thousand_of_imagenet_is_one_image_per_class(imagenet_subset, transform):
    dataset, mapping = validation_set(imagenet_subset / "val", 1000, transform, limit=1000)
    assert [target for _, target in dataset.samples] == list(range(1000))
    assert mapping.source == "ImageNet-1k synsets carried by timm"
