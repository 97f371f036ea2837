"""Prompts to try, written for this project: scenes for the miniature, detailed prose of 100 to 240 tokens for SDXL."""

from debias_diffusion.data.scenes import long_caption, make_scene, scene_rng

PROSE: dict[str, str] = {
    "Harbour workshop": (
        "A boat builder's workshop stands open to a small harbour on a clear autumn morning. In the middle of the floor "
        "rests the bare oak frame of a rowing boat, held upright by four wooden props. An old woman in a mustard yellow "
        "jumper planes a long plank at a bench along the left wall, and pale curls of wood cover her boots. Above the "
        "bench hang seven chisels in a row, each with a red handle except for the last, which is blue. A tabby cat is "
        "asleep in an upturned straw hat near the door. Outside, two green fishing boats are tied to a stone quay, and a "
        "single white gull sits on the mast of the nearer one. On the right a round window throws a patch of light onto "
        "a stack of folded grey sails. A brass lantern and a cup of tea stand on the windowsill, steam rising from the cup."
    ),
    "Night market": (
        "A narrow street market after rain, seen at eye level, its wet cobbles mirroring strings of paper lanterns. A "
        "young man in a turquoise raincoat grills skewers over glowing coals at the nearest stall. To his right a girl "
        "with round glasses holds a transparent umbrella and a paper bag of chestnuts. Behind them a fruit seller has "
        "built a pyramid of oranges with one green lime on top. A bicycle with a wicker basket full of sunflowers leans "
        "on a blue door at the left. Far down the street a tram with a single headlight comes round the corner. A small "
        "dog in a knitted red coat waits under the third table, looking at the coals. High above, on a balcony with iron "
        "railings, somebody has hung a purple carpet out to dry."
    ),
    "Greenhouse library": (
        "Inside a Victorian greenhouse that has been turned into a library, afternoon sun falls through a hundred panes "
        "of slightly misted glass. Tall fern leaves arch over shelves of cloth-bound books, and a spiral staircase of "
        "white iron climbs to a gallery at the back. In the foreground a round table carries an open atlas, a magnifying "
        "glass, half a pear on a china plate and a fountain pen with its cap off. A boy in a striped shirt sits on the "
        "second step of the stairs, reading to a tortoise. On the left wall hangs a clock without hands. A watering can "
        "made of copper stands by a pot of pink orchids under the gallery, and a yellow ladder leans against the highest "
        "shelf. Through the open door at the right one sees a gravel path and a wheelbarrow full of apples."
    ),
    "Mountain station": (
        "A tiny railway station high in the mountains in the last light of a winter day. Its wooden building is painted "
        "dark green, with a steep roof under thick snow and one lit window. A locomotive with a black boiler and a brass "
        "bell waits at the platform, its steam turning orange in the low sun. The station master, a tall man with a grey "
        "beard, holds a pocket watch in his left hand. Beside him stand three suitcases, the smallest of them covered "
        "with round paper labels. A fox looks out from behind the woodpile at the edge of the picture. Over the door a "
        "carved owl sits between two crossed skis. In the valley far below lie the lights of a village around a frozen "
        "lake, where someone has swept a large heart into the snow."
    ),
}

# The first is what the page opens with: the longer the prompt, the more of it the short encoders miss.
_SCENES = {"Scene, 9 shapes": (9, 3), "Scene, 8 shapes": (8, 2), "Scene, 7 shapes": (7, 1), "Scene, 6 shapes": (6, 0)}
_SPLIT = "app"  # scenes that neither training nor any test set has


def example_prompts(is_miniature: bool) -> dict[str, str]:
    """Title -> prompt: captions of scenes where the checkpoint is the miniature, prose where it is not."""
    return {title: _scene(*row) for title, row in _SCENES.items()} if is_miniature else PROSE


def _scene(things: int, index: int) -> str:
    return long_caption(make_scene(0, _SPLIT, index, (things, things)), scene_rng("caption", _SPLIT, index))
