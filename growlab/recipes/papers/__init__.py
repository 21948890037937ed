"""Reproduce the papers' tables and figures: their claims, our commands and results, and verdicts."""
