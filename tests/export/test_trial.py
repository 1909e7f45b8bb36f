"""The export that is tried before training finds what the last minute would."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import toys

from llava_ds.config.arguments import ModelArguments
from llava_ds.constants import ConfigError
from llava_ds.export import trial
from llava_ds.export.export_plan import ExportPlan
from llava_ds.export.tensors import Entry
from llava_ds.geometry import ImageOptions
from llava_ds.model.open.model_plan import plan_model


@pytest.fixture(scope="module")
def export(tmp_path_factory) -> ExportPlan:
    args = ModelArguments(**toys.write_base(tmp_path_factory.mktemp("trial") / "base"))
    plan = plan_model(args, 512)
    image_options = ImageOptions(plan.images.size, plan.images.patch_size, plan.images.mean)
    return ExportPlan(plan, args, image_options, torch.bfloat16, 512)


def test_it_opens_what_will_be_written_and_leaves_nothing(export, tmp_path):
    for form in ("hf", "llava"):
        line = trial.try_export(replace(export, form=form), tmp_path / "out")
        assert "the finished model will have 80 tensors" in line
    assert list((tmp_path / "out").iterdir()) == []


def test_it_needs_no_accelerate(export, tmp_path, monkeypatch):
    """Which is no requirement of this package, but of transformers for a device_map."""
    monkeypatch.setattr("transformers.integrations.accelerate.is_accelerate_available", lambda *_: False)
    assert "transformers opens its names and shapes" in trial.try_export(export, tmp_path / "out")


def without(name: str, entries: list[Entry]) -> list[Entry]:
    return [entry for entry in entries if not entry.name.endswith(name)]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            lambda e: without("layers.0.mlp.up_proj.weight", e),
            "1 tensors would be missing, such as model.language",
        ),
        (lambda e: [*e, replace(e[0], name="projector.layers.2.scale")], "1 tensors it does not know, such as"),
        (
            lambda e: [*without("model.norm.weight", e), Entry("language_model.model.norm.weight", (31,), e[0].read)],
            "1 tensors would have another shape, such as",
        ),
    ],
)
def test_names_and_shapes_that_transformers_does_not_take_are_refused(export, changed, message, tmp_path, monkeypatch):
    planned = trial.planned_entries(export)
    monkeypatch.setattr(trial, "planned_entries", lambda export: changed(planned))
    with pytest.raises(ConfigError, match="would not open the finished model: ") as error:
        trial.try_export(export, tmp_path)
    assert message in str(error.value) and "give --export_format llava" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_noticed_before_training(export, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ConfigError, match=r"takes 0\.0 GB, but only 0\.0 GB are free there: free disk space"):
        trial.try_export(export, tmp_path)
