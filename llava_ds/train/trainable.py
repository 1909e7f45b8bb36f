"""What a stage trains and at which rate: the parameter groups, and a table that says so."""

from torch import nn

from llava_ds.arguments import Arguments
from llava_ds.ds_config.optimizer import optimizer_name
from llava_ds.model.llava import LlavaModel


def choose_trainable(model: LlavaModel, args: Arguments) -> None:
    """Freeze what the stage leaves alone: the tower always, the language model in stage 1.

    The newline trains with the projector: in LLaVA's own stage 1 it stays as it was drawn.
    """
    model.vision_tower.requires_grad_(False)
    model.language_model.requires_grad_(not args.model.tune_mm_mlp_adapter)
    model.projector.requires_grad_(True)


def parameter_groups(model: LlavaModel, args: Arguments, optimizer: dict | None = None) -> list[dict]:
    """The optimizer's groups: language model, then projector and newline at --mm_projector_lr, each with and without
    decay.

    Biases and norms (every parameter of one dimension) do not decay. Empty groups are left out.
    optimizer: the block of the resolved JSON; Muon's has more groups.
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
    if optimizer is not None and optimizer_name(optimizer) == "Muon":
        return _muon_groups(model, groups, optimizer["params"], keep_projector=training.mm_projector_lr is not None)
    return groups


def _muon_groups(model: LlavaModel, groups: list[dict], params: dict, keep_projector: bool) -> list[dict]:
    """Each group's hidden matrices, for Muon at muon_lr, then its other parameters, for Adam at adam_lr.

    DeepSpeed tells the two apart by itself and would do the same, but lets the rate of a group win over both.
    keep_projector: --mm_projector_lr was given, and wins.
    Source: Muon (Jordan 2024): embeddings, output layer, norms and biases stay with Adam.
    """
    llm = model.language_model
    ends = [end for end in (llm.get_input_embeddings(), llm.get_output_embeddings()) if end is not None]
    adams = {id(p) for end in ends for p in end.parameters()}
    split = []
    for group in groups:
        own_rate = keep_projector and group["name"].startswith("projector")
        for key, of_muon in (("muon_lr", True), ("adam_lr", False)):
            half = [p for p in group["params"] if (_ndim(p) > 1 and id(p) not in adams) == of_muon]
            if half:
                lr = group["lr"] if own_rate else params.get(key, group["lr"])
                split.append({**group, "params": half, "lr": lr})
    return split


def describe(model: LlavaModel, groups: list[dict]) -> list[str]:
    """The table of parts: parameters, how many of them train, and their learning rate."""
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    lines = [f"  {'part':16}{'parameters':>16}{'trained':>16}   learning rate"]
    for name, part in model.named_children():
        parameters = list(part.parameters())
        trained = [p for p in parameters if id(p) in rates]
        rate = " and ".join(f"{rate:g}" for rate in sorted({rates[id(p)] for p in trained})) or "frozen"
        sizes = (f"{sum(map(num_elements, some)):>16,}" for some in (parameters, trained))
        lines.append(f"  {name:16}{''.join(sizes)}   {rate}")
    return lines


def _ndim(parameter: nn.Parameter) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))  # under ZeRO-3 the tensor itself is an empty shell


def num_elements(parameter: nn.Parameter) -> int:
    """Of the whole parameter, of which a rank may hold a shard."""
    return getattr(parameter, "ds_numel", parameter.numel())
