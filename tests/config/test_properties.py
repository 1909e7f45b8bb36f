"""Features that need what another one takes away: one line for each pair, from flags and DeepSpeed JSON alone."""

from ds_json import CONFIGS

from llava_ds.config.parsing import parse_arguments
from llava_ds.config.properties import Feature, clashes, core_features
from llava_ds.extensions.base import PROPERTIES

NEEDED = ["--output_dir", "out", "--deepspeed_config", str(CONFIGS / "zero1.json")]


def test_a_pair_has_one_line_with_the_first_reason():
    first = Feature("--first 2", {"whole_layers": "it counts them", "whole_sample": ""})
    second = Feature("--second", breaks=("whole_sample", "whole_layers"))
    said = "--first 2 needs all layers on every rank (it counts them), which --second takes away: leave one of them out"
    assert clashes([first, second]) == clashes([second, first]) == [said]
    assert clashes([first]) == clashes([second, second._replace(name="--third")]) == []


def test_what_a_folder_brings_stays():
    folder, flag = Feature("a model of this kind", {"whole_sample": ""}), Feature("--flag 2", breaks=("whole_sample",))
    assert clashes([folder, flag]) == [
        "a model of this kind needs all tokens of a sample on one rank, which --flag 2 takes away: leave --flag 2 out"
    ]
    (line,) = clashes([folder._replace(needs={}, breaks=("dense_mlps",)), Feature("--flag", {"dense_mlps": ""})])
    assert line == "--flag needs dense MLPs, which a model of this kind takes away: leave --flag out"


def test_every_property_of_the_core_is_known():
    flags = ["--gradient_checkpointing", "auto", "--mm_native_resolution", "True"]
    found = list(core_features(parse_arguments([*NEEDED, *flags])[0]))
    assert len(found) == 2 and all({*each.needs, *each.breaks} <= PROPERTIES.keys() for each in found)
