"""Pipeline parallelism: each rank holds a stage of consecutive layers, and stages exchange hidden states."""
