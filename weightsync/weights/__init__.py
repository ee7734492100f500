"""Model weights: reading them from a model, packing them into one payload, and applying a payload to another model."""
