"""The papers' tables and figures: claims, the commands that make them, our rows, and verdicts."""
