"""Growth of networks from public libraries; `python -m tests.foreign` writes the table."""
