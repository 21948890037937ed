"""The lab: experiments that PyTorch Lightning runs and Hydra composes.

Input that cannot be used raises `growlab.base.errors.UserError`, here and in `growlab.recipes`, with a sentence for
the user.
"""
