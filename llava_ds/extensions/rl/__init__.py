"""Reinforcement learning with GRPO, RLOO or PPO: the model trains on its own answers, judged by rewards."""
