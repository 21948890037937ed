"""The papers' tables and figures: what they claim, the commands that make them, our rows, and what those say."""
