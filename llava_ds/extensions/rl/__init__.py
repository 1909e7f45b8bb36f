"""Reinforcement learning: the model generates answers, and rewards judge them. GRPO, and PPO with a critic."""
