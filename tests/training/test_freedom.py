import pytest
import torch

from debias_diffusion.training.freedom import freeze_text_layers, parameter_groups


def test_frozen_layers_keep_their_bits_and_positions_learn(tiny):
    clip = tiny.model
    freeze_text_layers(clip, 1)
    before = {n: p.detach().clone() for n, p in clip.text.named_parameters()}
    ids = tiny.tokenizer(["A red star.", "A ring."]).input_ids
    optimizer = torch.optim.AdamW([p for p in clip.text.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)
    clip.text(torch.nn.functional.pad(ids, (0, 77 - ids.shape[1]))).square().sum().backward()
    optimizer.step()
    changed = {n for n, p in clip.text.named_parameters() if not torch.equal(p, before[n])}
    assert "positional_embedding" in changed
    assert "token_embedding.weight" not in changed
    assert {n.split(".")[2] for n in changed if "resblocks" in n} == {"1"}


@pytest.mark.parametrize("layers", [-1, 3])
def test_a_layer_that_is_not_there_is_named(tiny, layers):
    with pytest.raises(ValueError, match=f"frozen-text-layers is {layers}; this text tower has 2 layers"):
        freeze_text_layers(tiny.model, layers)


def test_one_group_as_published_unless_a_tower_has_a_rate_of_its_own(tiny):
    (group,) = parameter_groups(tiny.model, 1e-6, text=0.0, image=1e-6)
    assert [id(p) for p in group["params"]] == [id(p) for p in tiny.model.parameters()]
    assert group["lr"] == group["peak"] == 1e-6


def test_towers_learn_at_their_own_rates(tiny):
    wrapped = torch.nn.ModuleDict({"module": tiny.model})
    tiny.model.visual.conv1.requires_grad_(False)
    groups = {g["name"]: g for g in parameter_groups(wrapped, 1e-4, text=1e-5, image=3e-5)}
    assert {name: g["peak"] for name, g in groups.items()} == {"image": 3e-5, "text": 1e-5, "all": 1e-4}
    assert [id(p) for p in groups["all"]["params"]] == [id(tiny.model.logit_scale)]
    assert {id(p) for p in groups["text"]["params"]} == {id(p) for p in tiny.model.text.parameters()}
    assert sum(len(g["params"]) for g in groups.values()) == len(list(tiny.model.parameters())) - 1
    with pytest.raises(ValueError, match="no tower is called 'vision'"):
        parameter_groups(wrapped, 1e-4, vision=1e-5)
