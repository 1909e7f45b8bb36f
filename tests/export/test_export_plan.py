"""What a run's model will be written as is known, and said, before anything is built."""

from dataclasses import replace

import pytest
import toys

from llava_ds.config.arguments import Arguments, DataArguments, ModelArguments, TrainingArguments
from llava_ds.config.bounds import parse_size
from llava_ds.constants import ConfigError
from llava_ds.export.export_plan import export_format, hf_kind
from llava_ds.model.open.model_plan import plan_model


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bases")
    return {kind: toys.write_base(folder / kind) for kind in ("clip",)} | {
        kind: {
            **toys.write_base(folder / kind),
            **toys.write_tower(folder / kind / "tower", kind),
        }
        for kind in ("siglip", "siglip2")
    }


def planned(flags: dict, ratio: str, given: frozenset = frozenset(), form: str = "hf", **model: object):
    args = Arguments(
        ModelArguments(**flags, **model),
        DataArguments(image_aspect_ratio=ratio),
        TrainingArguments(export_format=form),
        given,
    )
    plan = plan_model(args.model, 512)
    return args, plan, plan.tower.image_options(args)


@pytest.mark.parametrize(
    ("ratio", "flags", "kind"),
    [
        ("square", {}, "llava"),
        ("pad", {"mm_patch_merge_type": "spatial"}, "llava"),
        ("pad", {"mm_patch_merge_type": "spatial_maxpool2x2"}, "llava"),  # there are no tiles
        ("square", {"mm_vision_select_feature": "cls_patch"}, "llava"),
        ("anyres", {"mm_patch_merge_type": "spatial_unpad"}, "llava_next"),
        ("anyres_max_9", {"mm_patch_merge_type": "spatial_unpad"}, "llava_onevision"),
    ],
)
def test_transformers_has_a_class_for_what_llava_trains(bases, ratio, flags, kind):
    args, plan, image_options = planned(bases["clip"], ratio, **flags)
    assert hf_kind(plan, args.model, image_options) == (kind, "")
    assert export_format(args, plan, image_options) == ("hf", [])


@pytest.mark.parametrize(
    ("ratio", "flags", "message"),
    [
        ("anyres", {"mm_patch_merge_type": "flat"}, "leaves padding out: give --mm_patch_merge_type spatial_unpad"),
        ("anyres_max_4", {"mm_patch_merge_type": "spatial"}, "give --mm_patch_merge_type spatial_unpad"),
        ("anyres", {"mm_patch_merge_type": "spatial_unpad_nobase"}, "LlavaNext always begins with the overview: give"),
        ("anyres", {"mm_patch_merge_type": "spatial_maxpool2x2"}, "LlavaNext never pools tiles: give"),
        ("anyres_max_4", {"mm_patch_merge_type": "spatial_unpad_maxpool2x2_nobase"}, "never pools tiles: give"),
        ("pad", {"mm_patch_merge_type": "spatial_unpad_nobase"}, "give --mm_patch_merge_type flat, or --image_aspect"),
        ("pad", {"mm_patch_merge_type": "spatial_unpad"}, "give --mm_patch_merge_type flat, or --image_aspect_ratio"),
        ("pad", {"mm_projector_type": "linear"}, "no class with --mm_projector_type linear: give mlp2x_gelu"),
        ("square", {"s2": True, "s2_scales": "24,48"}, "no class with --s2 True: leave it out"),
    ],
)
def test_where_there_is_no_class_llavas_format_takes_its_place(bases, ratio, flags, message):
    args, plan, image_options = planned(bases["clip"], ratio, **flags)
    form, [line] = export_format(args, plan, image_options)
    assert form == "llava" and message in line
    with pytest.raises(ConfigError, match="--export_format hf is not possible: ") as error:
        export_format(replace(args, given=frozenset({"export_format"})), plan, image_options)
    assert message in str(error.value) and str(error.value).endswith("; or give --export_format llava")
    asked = planned(bases["clip"], ratio, form="llava", **flags)
    assert export_format(*asked) == ("llava", [])


def test_a_siglip_2_goes_out_in_llavas_format_and_a_siglip_to_transformers(bases):
    for kind, expected in (("siglip", None), ("siglip2", "take another --vision_tower")):
        args, plan, image_options = planned(bases[kind], "pad")
        form, lines = export_format(args, plan, image_options)
        assert (form, lines) == ("hf", []) if expected is None else form == "llava" and expected in lines[0]


def test_stage_1_leaves_a_projector_whatever_it_is(bases):
    args, plan, image_options = planned(bases["clip"], "pad", mm_projector_type="linear", tune_mm_mlp_adapter=True)
    assert export_format(args, plan, image_options) == ("projector", [])


def test_sizes_of_shards():
    assert [parse_size(text) for text in ("5GB", "200 mb", "1.5KB", "10B")] == [5 * 10**9, 200 * 10**6, 1500, 10]
    for text in ("5", "5GiB", "0GB", "much"):
        with pytest.raises(ConfigError, match="give a size like 5GB or 200MB"):
            parse_size(text)
