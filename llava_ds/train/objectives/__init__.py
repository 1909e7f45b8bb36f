"""What training minimises: each objective turns a micro-batch into a summed loss and its factor in the step.

An objective has forward(engine, batch) -> MicroLoss and scales(window, counts) -> the factor of each micro-batch.
"""
