"""The launch files that ship: accelerate reads them, and they name classes that exist."""

from pathlib import Path

import open_clip.transformer
import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from timm.models.vision_transformer import Block

from debias_diffusion.training.launch import processes_in_command

CONFIGS = Path(__file__).resolve().parents[2] / "train" / "configs"
FILES = {"one_gpu": (1, 1), "eight_gpus": (8, 1), "two_machines": (16, 2), "cpu_pair": (2, 1), "fsdp": (8, 1)}


def test_every_file_is_known_here():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(FILES)


@pytest.mark.parametrize("name", FILES)
def test_accelerate_reads_it_and_the_run_knows_how_many_were_asked_for(name):
    path = str(CONFIGS / f"{name}.yaml")
    config = load_config_from_file(path)
    assert (config.num_processes, config.num_machines) == FILES[name]
    command = ["accelerate", "launch", "--config_file", path, "train/encoder.py", "debias-b16"]
    assert processes_in_command(command) == FILES[name][0]


def test_sharding_names_real_settings_and_blocks_of_both_towers():
    sharding = load_config_from_file(str(CONFIGS / "fsdp.yaml")).fsdp_config
    known = vars(launch_command_parser().parse_args(["train/encoder.py"]))
    assert sharding.keys() <= known.keys()
    assert sharding["fsdp_transformer_layer_cls_to_wrap"] == open_clip.transformer.ResidualAttentionBlock.__name__
    assert "ResidualAttentionBlock,Block" in (CONFIGS / "fsdp.yaml").read_text().replace("\n# ", " ")
    assert Block.__name__ == "Block"
