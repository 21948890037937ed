"""`growlab plan`: odds of a smaller, a grown and the full network for an experiment, and its experiment files."""
