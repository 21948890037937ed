"""growlab grows neural networks while they train: from a narrow seed to the ordinary full-width network."""
