"""The lab: experiments that PyTorch Lightning runs and Hydra composes."""
