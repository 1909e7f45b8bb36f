"""Register preference objectives, and compute reference log-probabilities before the first step."""

from collections.abc import Iterator
from dataclasses import fields

from deepspeed import DeepSpeedEngine

from llava_ds.data.loader import Window
from llava_ds.engine.runner import Direct, Runner
from llava_ds.extensions.base import Extension, SessionPart
from llava_ds.extensions.preference.dpo import DPO, PairLoss, has_reference
from llava_ds.extensions.preference.kto import KTO, AnswerLoss, Divergence, Mismatched, label_answers
from llava_ds.extensions.preference.reference import Reference, add_reference
from llava_ds.extensions.preference.reward import Reward, RewardLoss
from llava_ds.runtime.mesh import Mesh
from llava_ds.runtime.ranks import print_first
from llava_ds.second_models.forward_identity import forward_digest
from llava_ds.second_models.frozen import FrozenPlan, open_frozen, plan_frozen
from llava_ds.train.objectives.objective import Objective
from llava_ds.train.objectives.prompt_sharing import shares_prompts
from llava_ds.train.plan import Plan, PlanDraft
from llava_ds.train.start import Start


def plan_reference(draft: PlanDraft) -> FrozenPlan | None:
    """Plan the reference model; None if it is the run's initial model."""
    path = draft.args.own["preference"].ref_model_name_or_path
    if path is None:
        return None
    return plan_frozen("--ref_model_name_or_path", path, draft.model, draft.images, draft.args.data.model_max_length)


def objective(plan: Plan, mesh: Mesh, plain: Objective) -> Objective:
    """Return DPO, KTO or Reward to replace the plain objective."""
    own = plan.args.own["preference"]
    if plan.args.training.objective == "reward":
        loss = RewardLoss(own.center_rewards_coefficient, own.reward_loss)
        return Reward(loss, plain.num_sources, mesh.grad_ranks)
    if plan.args.training.objective == "kto":
        loss = AnswerLoss(own.beta, own.desirable_weight, own.undesirable_weight)
        return KTO(loss, plain.num_sources, mesh.grad_ranks, mesh)
    loss = PairLoss(**{field.name: getattr(own, field.name) for field in fields(PairLoss)})
    return DPO(loss, plain.num_sources, mesh.grad_ranks, mesh)


class References(SessionPart):
    """Lets the answers of a pair share their prompt, and adds reference log-probabilities to all data sets. Then frees
    a separate reference model."""

    def __init__(self, plan: Plan, started: Start) -> None:
        super().__init__(plan, started)
        self._divergence: Divergence | None = None  # only for kto
        other = plan.own["preference"]
        configs = [plan.model.text_config, *([] if other is None else [other.model.text_config])]
        shares = shares_prompts(plan.args.own["preference"].share_prompts, plan.args, configs)
        for dataset in plan.data_sets:
            dataset.shares_prompts = shares

    def started(self, runner: Runner) -> None:
        plan, ranks, mesh = self.plan, self.ranks, self.mesh
        data_sets, args = plan.data_sets, plan.args
        if args.training.objective == "kto":
            for dataset in data_sets:
                label_answers(dataset)
            mismatched = Mismatched.of(plan.steps.dataset, args.data.model_max_length)
            data_sets = [*data_sets, mismatched]
            workers = args.data.dataloader_num_workers
            self._divergence = Divergence(mismatched, plan.steps, runner, mesh, workers)
        elif args.training.objective != "dpo" or not has_reference(args.own["preference"].loss_type):
            return
        dtype, other = plan.resolved.compute_dtype, plan.own["preference"]
        if other is not None:
            model = open_frozen(other, dtype, ranks)
            mesh.adapt(model)
            runner = Direct(model)
        described = plan.model, plan.args.model, plan.images
        described = described if other is None else (other.model, other.args, other.images)
        reference = Reference(runner, dtype, forward_digest(*described))
        workers = plan.args.data.dataloader_num_workers
        for dataset in data_sets:
            print_first(add_reference(reference, dataset, plan.steps.packing, workers, ranks, mesh))

    def windows(self, engine: DeepSpeedEngine, done: int, plain: Iterator[Window]) -> Iterator[Window]:
        return plain if self._divergence is None else self._divergence.windows(done, plain)


extension = Extension(plan=plan_reference, objective=objective, part=References)
