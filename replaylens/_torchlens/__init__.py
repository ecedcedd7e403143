"""TorchLens's names for facts of layers, and its words for drawings; its functions are replaylens.compat."""
