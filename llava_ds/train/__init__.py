"""A training run: plan, session, loop, hooks, objectives and evaluation."""
