"""TorchLens's names for facts of layers, and its options for drawings; its functions are in replaylens.compat."""
