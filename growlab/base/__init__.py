"""Checks, errors and files that everything else uses."""
