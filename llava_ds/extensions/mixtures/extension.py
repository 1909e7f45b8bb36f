"""Register mixtures of experts: upcycle dense models, divide experts over ranks, and add the routers' loss."""

from collections.abc import Iterator
from dataclasses import replace

from transformers import PreTrainedConfig

from llava_ds.config.arguments import Arguments, ModelArguments, trained_parts
from llava_ds.constants import ConfigError
from llava_ds.engine.ds_config.activation import deep_compiles
from llava_ds.engine.ds_config.resolve import ResolvedConfig
from llava_ds.extensions.base import Extension, SessionPart, Wrap
from llava_ds.extensions.mixtures import upcycling
from llava_ds.extensions.mixtures.experts_json import optimizer_problems
from llava_ds.extensions.mixtures.kinds import is_mixture
from llava_ds.extensions.mixtures.mixture import check_implementation, choose_experts, mixture_problems, routers_of
from llava_ds.extensions.mixtures.text import Experts
from llava_ds.extensions.mixtures.upcycling import own
from llava_ds.model.llava import LlavaModel
from llava_ds.model.open.model_plan import ModelPlan
from llava_ds.model.open.weights import Sources
from llava_ds.runtime.ranks import Ranks
from llava_ds.train.objectives.objective import Objective
from llava_ds.train.plan import PlanDraft


def fits(args: Arguments, config: PreTrainedConfig) -> Iterator[str]:
    """Yield a line per flag that conflicts with the model's experts or needs experts."""
    return upcycling.upcycled_problems(args, config)


def plan(draft: PlanDraft) -> None:
    """Check the flags against model, adapters and the unresolved DeepSpeed JSON."""
    flags, text = own(draft.args.model), draft.model.text_config
    if lines := list(mixture_problems(flags, text, draft.args.model.model_name_or_path)):
        raise ConfigError("\n".join(lines))
    check_implementation(flags.experts_implementation, draft.model.only_products)
    upcycling.check_stage(text, draft.raw_config or {})


class Mixtures(Wrap):
    """Upcycle MLPs, select trained parameters, and choose how experts are computed."""

    def composed(
        self, text: PreTrainedConfig, sources: Sources, args: ModelArguments
    ) -> tuple[PreTrainedConfig, Sources, list[str]]:
        return upcycling.upcycle(text, sources, args) if own(args).moe_enable else (text, sources, [])

    def planned(self, plan: ModelPlan, model: LlavaModel, args: ModelArguments) -> ModelPlan:
        if note := upcycling.capacity_note(args):
            plan = replace(plan, notes=(*plan.notes, note))
        if own(args).router_aux_loss_coef:
            plan = replace(plan, whole_last_layer="--router_aux_loss_coef is computed over all positions")
        return plan

    def trains(self, model: LlavaModel, args: ModelArguments) -> None:
        if own(args).train_modules is None or "language_model" not in trained_parts(args):
            return
        named = dict(model.language_model.named_parameters())
        trained = upcycling.trained_of(list(named), own(args).train_modules)
        for name, parameter in named.items():
            parameter.requires_grad_(name in trained)

    def groups(self, groups: list[dict]) -> list[dict]:
        from llava_ds.extensions.mixtures.expert_parallel import with_groups_of_experts

        return with_groups_of_experts(groups)

    def kernels(self, model: LlavaModel, plan: ModelPlan, resolved: ResolvedConfig, ranks: Ranks) -> list[str]:
        if not is_mixture(plan.text_config):
            return []
        compiled = resolved.args.compiles or deep_compiles(resolved.config)
        wanted = own(resolved.args.model).experts_implementation
        return [choose_experts(model.language_model, wanted, ranks.device, compiled)]


class Routing(SessionPart):
    """Keep this rank's experts, and add the routers' loss and load."""

    def built(self, model: LlavaModel) -> None:
        from llava_ds.extensions.mixtures.expert_parallel import share_experts

        self._language_model = model.language_model
        share_experts(model, self.mesh)

    def training_objective(self, plain: Objective) -> Objective:
        from llava_ds.extensions.mixtures.routed import Routed

        return Routed(plain, routers_of(self._language_model), own(self.plan.args.model).router_aux_loss_coef)


extension = Extension(check=optimizer_problems, fits=fits, plan=plan, wrap=Mixtures(), part=Routing, text=Experts())
