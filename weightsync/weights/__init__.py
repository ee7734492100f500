"""Model weights: what a model has, how it is packed into one payload, and how a payload is applied to another model."""
