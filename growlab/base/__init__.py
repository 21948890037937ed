"""Checks, errors, files and ranks, for all other packages."""
