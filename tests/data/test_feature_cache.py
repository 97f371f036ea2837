"""Features come back from disk exactly, are computed again when anything they follow from changes, and never lie."""

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from debias_diffusion.data.feature_cache import FeatureCache
from debias_diffusion.data.pictures import BadPicture
from debias_diffusion.data.retrieval_set import PictureFile
from debias_diffusion.encoders.encoder import Encoder, build
from debias_diffusion.encoders.features import image_features, text_features

CAPTIONS = ["A small red star in the top left.", "A large blue ring. " * 30, "", "a ring"]


@dataclasses.dataclass
class Flat:
    """A picture of one colour that counts how often it is opened, and can be out of reach."""

    colour: str
    is_away: bool = False
    num_opened: int = 0

    @property
    def identity(self) -> str:
        return self.colour

    def open(self) -> Image.Image:
        self.num_opened += 1
        if self.is_away:
            raise BadPicture(Path(self.colour), "out of reach")
        return Image.new("RGB", (40, 30), self.colour)


@pytest.fixture
def pictures() -> list[Flat]:
    return [Flat("red"), Flat("green"), Flat("blue")]


@contextmanager
def passes(tower: nn.Module) -> Iterator[list[int]]:
    """Counts how often a text tower is gone through to the end."""
    seen: list[int] = []
    hook = tower.ln_final.register_forward_hook(lambda *_: seen.append(1))
    yield seen
    hook.remove()


def num_files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def test_what_was_kept_equals_what_is_computed(tiny, pictures, tmp_path):
    with passes(tiny.model.text) as seen:
        for _ in range(2):
            cache = FeatureCache(tmp_path)  # as a later process would
            texts, images = cache.text_features(tiny, CAPTIONS), cache.image_features(tiny, pictures)
            assert torch.equal(texts.features, text_features(tiny, CAPTIONS))
            assert torch.equal(images.features, image_features(tiny, [Flat(p.colour).open() for p in pictures]))
            assert texts.num_tokens.tolist() == [len(tiny.tokenizer.encode(c)) for c in CAPTIONS]
    assert len(seen) == 1 + 2  # once for the cache, twice for the comparison
    assert [picture.num_opened for picture in pictures] == [1, 1, 1]
    assert num_files(tmp_path) == 2
    assert not list(tmp_path.rglob("*partial*"))


def test_without_a_folder_nothing_is_kept(tiny, pictures, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):
        FeatureCache().image_features(tiny, pictures)
    assert [picture.num_opened for picture in pictures] == [2, 2, 2]
    assert num_files(tmp_path) == 0


def test_a_step_of_training_is_noticed(tiny, tmp_path):
    cache = FeatureCache(tmp_path)
    before, hashed = cache.text_features(tiny, CAPTIONS).features, cache.tower_hash(tiny, "text")
    optimiser = torch.optim.SGD(tiny.model.text.parameters(), lr=0.1)
    tiny.model.text(tiny.tokenizer(CAPTIONS[:1]).input_ids.new_zeros(1, 77)).sum().backward()
    optimiser.step()
    assert cache.tower_hash(tiny, "text") != hashed
    after = cache.text_features(tiny, CAPTIONS).features
    assert not torch.equal(after, before)
    assert torch.equal(after, text_features(tiny, CAPTIONS))


def rebuilt(tiny: Encoder, **changes: object) -> Encoder:
    """The same weights under another config."""
    config = {k: v for k, v in tiny.model_config.items() if k != "custom_text"} | changes
    return build("other", config, bpe_file=tiny.tokenizer.bpe_file, state=tiny.model.state_dict())


def test_what_no_weight_tells_is_in_the_hash(tiny):
    cache = FeatureCache()
    same, gelu = rebuilt(tiny), rebuilt(tiny, quick_gelu=False)
    heads = rebuilt(tiny, text_cfg={**tiny.model_config["text_cfg"], "heads": 4})
    assert cache.tower_hash(same, "text") == cache.tower_hash(tiny, "text")
    assert cache.tower_hash(gelu, "text") != cache.tower_hash(tiny, "text")
    assert cache.tower_hash(gelu, "visual") != cache.tower_hash(tiny, "visual")
    assert cache.tower_hash(heads, "text") != cache.tower_hash(tiny, "text")
    assert cache.tower_hash(heads, "visual") == cache.tower_hash(tiny, "visual")


def test_another_transform_or_picture_is_another_entry(tiny, pictures, tmp_path):
    cache = FeatureCache(tmp_path)
    cache.image_features(tiny, pictures)
    squashed = dataclasses.replace(tiny, preprocess_config={**tiny.preprocess_config, "resize_mode": "squash"})
    cache.image_features(squashed, pictures)
    cache.image_features(tiny, pictures[::-1])
    assert num_files(tmp_path) == 3
    assert [picture.num_opened for picture in pictures] == [3, 3, 3]


def test_captions_are_cut_to_the_limit_and_told_apart_by_it(tiny, tmp_path):
    cache = FeatureCache(tmp_path)
    whole, cut = cache.text_features(tiny, CAPTIONS), cache.text_features(tiny, CAPTIONS, max_tokens=6)
    shorter = dataclasses.replace(tiny, tokenizer=tiny.tokenizer.with_context(6))
    assert torch.equal(cut.features, text_features(shorter, CAPTIONS))
    assert not torch.allclose(cut.features[0], whole.features[0], atol=1e-4)
    torch.testing.assert_close(cut.features[2:], whole.features[2:], atol=1e-6, rtol=0)  # these fit in six tokens
    assert torch.equal(cut.num_tokens, whole.num_tokens)
    beyond = cache.text_features(tiny, CAPTIONS, max_tokens=tiny.context_length + 100)
    assert torch.equal(beyond.features, whole.features)
    assert num_files(tmp_path) == 2


def damage_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def damage_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-30] ^= 1
    path.write_bytes(bytes(data))


def damage_all(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize("damage", [damage_end, damage_bit, damage_all])
def test_a_damaged_file_is_computed_again_with_a_warning(damage, tiny, pictures, tmp_path, caplog):
    cache = FeatureCache(tmp_path)
    texts, images = cache.text_features(tiny, CAPTIONS), cache.image_features(tiny, pictures)
    for path in tmp_path.rglob("*.safetensors"):
        damage(path)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(cache.text_features(tiny, CAPTIONS).features, texts.features)
        assert torch.equal(cache.image_features(tiny, pictures).features, images.features)
    assert caplog.text.count("is damaged") == 2
    caplog.clear()
    cache.image_features(tiny, pictures)  # the file is whole again
    assert pictures[0].num_opened == 2
    assert not caplog.records


def test_a_folder_that_takes_no_files_costs_only_the_cache(tiny, tmp_path, caplog):
    (tmp_path / "taken").touch()
    texts = FeatureCache(tmp_path / "taken").text_features(tiny, CAPTIONS)
    assert torch.equal(texts.features, text_features(tiny, CAPTIONS))
    assert "features were not kept in" in caplog.text


def test_unreadable_pictures_are_named_and_read_once_they_are_back(tiny, pictures, tmp_path):
    cache = FeatureCache(tmp_path)
    pictures[1].is_away = True
    for _ in range(2):
        images = cache.image_features(tiny, pictures)
        assert images.unreadable == {1: "green: out of reach"}
        assert len(images.features) == 2
    assert pictures[0].num_opened == 1
    pictures[1].is_away = False
    images = cache.image_features(tiny, pictures)
    assert images.unreadable == {}
    assert len(images.features) == 3


def test_a_file_that_changes_is_read_again(tiny, tmp_path):
    cache, path = FeatureCache(tmp_path / "cache"), tmp_path / "a.png"
    Image.new("RGB", (8, 8), "red").save(path)
    red = cache.image_features(tiny, [PictureFile(path)]).features
    Image.new("RGB", (9, 9), "blue").save(path)
    assert not torch.equal(cache.image_features(tiny, [PictureFile(path)]).features, red)


def test_no_readable_picture_is_an_error(tiny, tmp_path):
    with pytest.raises(ValueError, match="none of the 2 pictures can be read; the first: red: out of reach"):
        FeatureCache(tmp_path).image_features(tiny, [Flat("red", True), Flat("blue", True)])
    assert num_files(tmp_path) == 0
