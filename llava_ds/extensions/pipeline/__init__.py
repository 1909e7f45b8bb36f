"""Pipeline parallelism: each rank has a stage of consecutive layers; hidden states are sent between stages."""
