"""Reinforcement learning: the model draws answers, and rewards judge them. GRPO, and PPO with a critic."""
