"""What a stage trains and at which rate: the parameter groups, and a table that says so."""

from torch import nn

from llava_ds.arguments import Arguments
from llava_ds.model.llava import LlavaModel


def choose_trainable(model: LlavaModel, args: Arguments) -> None:
    """Freeze what the stage leaves alone: the tower always, the language model in stage 1.

    The newline trains with the projector: in LLaVA's own stage 1 it stays as it was drawn.
    """
    model.vision_tower.requires_grad_(False)
    model.language_model.requires_grad_(not args.model.tune_mm_mlp_adapter)
    model.projector.requires_grad_(True)


def parameter_groups(model: LlavaModel, args: Arguments) -> list[dict]:
    """AdamW's groups: language model, then projector and newline at --mm_projector_lr, each with and without decay.

    Biases and norms (every parameter of one dimension) do not decay. Empty groups are left out.
    Source: LLaVA's LLaVATrainer.create_optimizer.
    """
    training = args.training
    projector_lr = training.learning_rate if training.mm_projector_lr is None else training.mm_projector_lr
    groups = []
    for name, parts, lr in (
        ("language_model", ["language_model"], training.learning_rate),
        ("projector", ["projector", "newline"], projector_lr),
    ):
        named = [part for child, part in model.named_children() if child in parts]
        trained = [p for part in named for p in part.parameters() if p.requires_grad]
        for suffix, decay, params in (
            ("", training.weight_decay, [p for p in trained if _ndim(p) > 1]),
            ("_no_decay", 0.0, [p for p in trained if _ndim(p) <= 1]),
        ):
            if params:
                groups.append({"name": name + suffix, "params": params, "lr": lr, "weight_decay": decay})
    return groups


def describe(model: LlavaModel, groups: list[dict]) -> list[str]:
    """The table of parts: parameters, how many of them train, and their learning rate."""
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    lines = [f"  {'part':16}{'parameters':>16}{'trained':>16}   learning rate"]
    for name, part in model.named_children():
        parameters = list(part.parameters())
        trained = [p for p in parameters if id(p) in rates]
        rate = f"{rates[id(trained[0])]:g}" if trained else "frozen"
        lines.append(f"  {name:16}{sum(map(_numel, parameters)):>16,}{sum(map(_numel, trained)):>16,}   {rate}")
    return lines


def _ndim(parameter: nn.Parameter) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))  # under ZeRO-3 the tensor itself is an empty shell


def _numel(parameter: nn.Parameter) -> int:
    return getattr(parameter, "ds_numel", parameter.numel())
