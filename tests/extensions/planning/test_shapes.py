"""Shapes of models in folders, and of models with experts."""

import llavas
import pytest
import toys
from known_flags import needs
from llavas import arguments, opened

from llava_ds.extensions.planning.shapes import shape_of, shape_of_folders

MOE = {"moe_enable": True, "num_experts": 4, "top_k_experts": 2}


def test_an_estimate_of_a_llava_is_that_of_its_parts(tmp_path):
    base = toys.write_base(tmp_path / "base")
    model = llavas.hf_model(base)
    folders = [llavas.write_hf(tmp_path / "hf", base, model), llavas.write_llava(tmp_path / "llava", base, model)]
    parts = shape_of_folders(arguments(base))
    assert all(shape_of_folders(arguments(flags)).parts == parts.parts for flags in folders)


@needs("moe_enable")
def test_the_estimate_counts_every_expert_and_flops_those_of_a_token(tmp_path):
    base = toys.write_base(tmp_path)
    _, dense, args = opened(base)
    shapes = {}
    for name, more in {"dense": {}, "moe": MOE, "ep": {**MOE, "ep_size": 2}}.items():
        flags = args.replaced(**more, **({"moe_mode": "dense"} if more else {}))
        shapes[name] = shape_of(dense.text_config, dense.tower, flags)
    mlps, hidden = 2 * 3 * 32 * 48, 32
    routers = 2 * 4 * hidden
    assert shapes["moe"].num_parameters == shapes["dense"].num_parameters + 3 * mlps + routers
    assert shapes["moe"].trained_of_rank == shapes["moe"].num_trained
    assert shapes["ep"].trained_of_rank == shapes["moe"].num_trained - 2 * mlps
    assert [sum(group) for group, routed in zip(shapes["ep"].groups, shapes["ep"].of_experts) if routed] == [2 * mlps]
    assert shapes["ep"].copies(8) == [4 if routed else 8 for routed in shapes["ep"].of_experts]
    more = shapes["moe"].flops.per_token - shapes["dense"].flops.per_token
    assert more == pytest.approx(6 * (mlps + routers))  # one more MLP a layer, and the router
