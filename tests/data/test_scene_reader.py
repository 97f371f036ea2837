import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageChops, ImageFilter

from debias_diffusion.data.scene_reader import Reading, ThingScore, read_scene, score_scene, score_thing
from debias_diffusion.data.scenes import BACKGROUNDS, COLOURS, PLACES, SIZE, Scene, Thing, make_scene, render

SCENES = [make_scene(3, "reader", i, things=(0 if i % 2 else 6, 9)) for i in range(500)]


def in_order(scene: Scene) -> tuple[Thing, ...]:
    return tuple(sorted(scene.things, key=lambda thing: thing.place))


def noisy(picture: Image.Image, seed: int, sigma: float = 12.0) -> Image.Image:
    noise = np.random.default_rng(seed).normal(0, sigma, (SIZE, SIZE, 3))
    return Image.fromarray((np.asarray(picture) + noise).clip(0, 255).round().astype(np.uint8))


def blurred(picture: Image.Image, seed: int) -> Image.Image:
    return picture.filter(ImageFilter.GaussianBlur(1.0))


def moved(picture: Image.Image, seed: int) -> Image.Image:
    """A pixel to the side and up, as a drawing model may be off."""
    shifted = ImageChops.offset(picture, 1, -1)
    shifted.paste(picture.getpixel((0, 0)), (0, 0, 1, SIZE))
    shifted.paste(picture.getpixel((0, 0)), (0, SIZE - 1, SIZE, SIZE))
    return shifted


def both(picture: Image.Image, seed: int) -> Image.Image:
    return noisy(blurred(picture, seed), seed)


def test_a_drawn_scene_is_read_exactly():
    for scene in SCENES:
        assert read_scene(render(scene)) == Reading(scene.background, in_order(scene))


@pytest.mark.parametrize("spoil", [noisy, blurred, moved, both])
def test_noise_blur_and_a_pixel_off_cost_no_more_than_one_thing_in_a_hundred(spoil):
    right = told = false = 0
    for seed, scene in enumerate(SCENES[:200]):
        reading = read_scene(spoil(render(scene), seed))
        right += len(set(reading.things) & set(scene.things))
        told += len(scene.things)
        false += sum(1 for thing in reading.things if thing.place not in {t.place for t in scene.things})
    assert right / told >= 0.99
    assert false / told <= 0.002


def test_a_background_that_is_told_is_taken():
    scene = SCENES[0]
    other = next(b for b in BACKGROUNDS if b != scene.background)
    assert read_scene(render(scene), scene.background).things == in_order(scene)
    assert read_scene(render(scene), other).background == other
    with pytest.raises(ValueError, match="no background is called 'pale'; backgrounds: grey, "):
        read_scene(render(scene), "pale")


def test_a_bare_or_flat_picture_holds_nothing():
    for name, colour in BACKGROUNDS.items():
        assert read_scene(Image.new("RGB", (SIZE, SIZE), colour)) == Reading(name, ())


def test_another_size_is_refused():
    with pytest.raises(ValueError, match="32 x 64 pixels; expected 64 x 64"):
        read_scene(Image.new("RGB", (32, 64)))


@settings(max_examples=40, deadline=None)
@given(index=st.integers(0, 10_000), other=st.integers(0, 10_000))
def test_scores_are_those_of_a_plain_comparison(index, other):
    shown, scene = make_scene(1, "shown", index), make_scene(1, "asked", other)
    at = {thing.place: thing for thing in shown.things}
    for thing, score in zip(scene.things, score_scene(render(shown), scene), strict=True):
        found = at.get(thing.place)
        assert score.thing == thing
        assert score.present == (found is not None)
        assert score.colour == (found is not None and found.colour == thing.colour)
        assert score.shape == (found is not None and found.shape == thing.shape)
        assert score.size == (found is not None and found.large == thing.large)
        assert score.all_right == (found == thing)
        twins = [t for t in shown.things if (t.colour, t.shape) == (thing.colour, thing.shape)]
        assert score.elsewhere == any(t.place != thing.place for t in twins)


def test_each_attribute_is_scored_by_itself():
    told = Thing("star", "red", (0, 2), False)

    def score(*shown: Thing) -> ThingScore:
        return score_thing(Reading("grey", shown), told)

    assert score() == ThingScore(told, False, False, False, False, False)
    assert score(told) == ThingScore(told, True, True, True, True, False)
    assert score(Thing("star", "red", (1, 1), True)) == ThingScore(told, False, False, False, False, True)
    assert score(Thing("ring", "red", (0, 2), False)) == ThingScore(told, True, True, False, True, False)
    assert score(Thing("star", "blue", (0, 2), False)) == ThingScore(told, True, False, True, True, False)
    large = score(Thing("star", "red", (0, 2), True))
    assert (large.colour, large.shape, large.size, large.all_right) == (True, True, False, False)


def test_every_kind_of_thing_is_told_from_every_other():
    for shape in ("circle", "square", "triangle", "diamond", "star", "cross", "ring"):
        for colour in COLOURS:
            things = tuple(Thing(shape, colour, place, place[1] == 1) for place in PLACES)
            background = max(BACKGROUNDS, key=lambda b: np.linalg.norm(np.subtract(BACKGROUNDS[b], COLOURS[colour])))
            assert read_scene(render(Scene(things, background))).things == things
