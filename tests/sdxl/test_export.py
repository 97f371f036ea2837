"""Slot folders equal the towers they came from, open in stock classes, and are whole or absent."""

import dataclasses
import json
import shutil
from pathlib import Path

import pytest
import torch
from conftest import LONG, SHORT, SLOT_NAMES, make_tower, trained
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer
