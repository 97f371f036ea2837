"""A device is there, or those that are are listed."""

import pytest
import torch

from debias_diffusion.sdxl.devices import find_device


def test_a_device_that_is_there_is_taken_as_it_is_called():
    assert find_device("cpu") == "cpu"
    assert find_device() == ("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("name", ["foo", "cuda:99", "meta", "cpu:x", ""])
def test_one_that_is_not_lists_those_that_are(name):
    with pytest.raises(ValueError, match=rf"no device '{name}' here; devices: cpu"):
        find_device(name)
