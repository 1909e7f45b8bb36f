"""The comparison of copies in a run: every few steps, when the step is judged."""

from llava_ds.extensions.base import Extension, Hook, Phase, StepEnd
from llava_ds.extensions.replicas.replicas import check_replicas


class Compare(Hook):
    """Ends the run when copies differ."""

    def after_step(self, end: StepEnd) -> None:
        session, every = self.session, self.session.plan.args.own["replicas"].check_divergence_steps
        check_replicas(session.model, end.step, every, session.ranks)


extension = Extension(hooks=((Phase.JUDGE, Compare),))
