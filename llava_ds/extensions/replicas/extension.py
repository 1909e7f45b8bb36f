"""Register the check of weight copies: every few steps, before weights are evaluated or saved."""

from llava_ds.extensions.base import Extension, Hook, Phase, StepEnd


class Compare(Hook):
    """Ends the run if ranks' copies of a weight differ."""

    def after_step(self, end: StepEnd) -> None:
        session, every = self.session, self.session.plan.args.own["replicas"].check_divergence_steps
        if every and end.step % every == 0 and session.ranks.world_size > 1:
            from llava_ds.extensions.replicas.replicas import check_replicas

            check_replicas(session.model, end.step, every, session.ranks)


extension = Extension(hooks=((Phase.JUDGE, Compare),))
